"""Groups that assemble a matrix: none if a rank stores all of the matrix, and no more ranks than the mesh."""

import pytest
from hypothesis import given

from tests.unit.plans import examples, mesh_of, parameter_lists, parameter_of
from titan_muon.engine.layout.intervals import Geometry
from titan_muon.engine.layout.types import (
    Interval,
    Layout,
    MatrixRows,
    MatrixStack,
    Mesh,
    Parameter,
    Placement,
    Replicate,
    Shard,
)
from titan_muon.engine.planning import Assembly, assemblies

FLAT, SQUARE = mesh_of(4), mesh_of(2, 2)


def stored(shape: tuple[int, ...], mesh: Mesh, *placements: Placement) -> Geometry:
    """A matrix, or experts."""
    parameter = parameter_of("w", shape, mesh, *placements)
    return Geometry(parameter.layout, parameter.stack)


@examples(75)
@given(parameter_lists())
def test_every_matrix_is_local_or_whole_in_every_group(parameters: list[Parameter]) -> None:
    for parameter in parameters:
        check_assemblies(Geometry(parameter.layout, parameter.stack))


def check_assemblies(geometry: Geometry) -> None:
    for split in (True, False):
        for index, assembly in enumerate(assemblies(geometry, split)):
            check_assembly(geometry, index, assembly, split)


def check_assembly(geometry: Geometry, index: int, assembly: Assembly, split: bool) -> None:
    elements = geometry.elements(index)
    assert bool(assembly.local) != bool(assembly.groups), "a matrix is at home or travels"
    assert set(assembly.local) <= set(elements)
    assert all(elements[rank] == geometry.numel(index) for rank in assembly.local)
    for group in assembly.groups:
        assert list(group) == sorted(set(group))
        assert set(group) <= set(geometry.layout.mesh.ranks)
        assert len({geometry.tensor[rank] for rank in group}) == 1, "separate tensors are never assembled together"
        held: dict[tuple[int, ...], int] = {}
        for rank in set(group) & set(elements):
            copy = geometry.replica[rank]
            held[copy] = held.get(copy, 0) + elements[rank]
        assert set(held.values()) == {geometry.numel(index)}, "every copy of the matrix is whole within the group"
        assert split or len(held) == 1, "without a split each copy has a group of its own"
    taking_part = [rank for group in assembly.groups for rank in group]
    assert len(taking_part) == len(set(taking_part)), "no rank assembles a matrix twice"
    assert set(elements) <= {*taking_part, *assembly.local}, "every holder takes part"


HEADS = MatrixStack(1, (MatrixRows("0", (Interval(0, 4),)), MatrixRows("1", (Interval(4, 8),))))
ALL = (0, 1, 2, 3)


CASES = {
    "whole experts": (stored((4, 3, 5), FLAT, Shard(0)), True, [((rank,), ()) for rank in ALL]),
    # By rows: the flattened rows do not matter, dim 0 is cut 1, 1, 1, 0.
    "fewer experts": (stored((3, 2, 5), FLAT, Shard(0)), True, [((rank,), ()) for rank in ALL[:3]]),
    "rows of experts": (stored((2, 4, 5), SQUARE, Shard(1), Shard(0)), True, [((), ((0, 2),)), ((), ((1, 3),))]),
    # The rank without a row may orthogonalize too.
    "3 rows over 4 ranks": (stored((3, 4), FLAT, Shard(0)), True, [((), (ALL,))]),
    "a single row": (stored((1, 4), FLAT, Shard(0)), True, [((0,), ())]),
    "replicas share work": (stored((8, 4), SQUARE, Replicate(), Shard(0)), True, [((), (ALL,))]),
    "replicas repeat": (stored((8, 4), SQUARE, Replicate(), Shard(0)), False, [((), ((0, 1), (2, 3)))]),
    "whole replicas share work": (stored((8, 4), FLAT, Replicate()), True, [((), (ALL,))]),
    "whole replicas repeat": (stored((8, 4), FLAT, Replicate()), False, [(ALL, ())]),
    # TP by rows: head 0 is on ranks 0 and 2, head 1 on ranks 1 and 3.
    "heads over FSDP x TP": (
        Geometry(Layout((8, 4), SQUARE, (Shard(1), Shard(0))), HEADS),
        True,
        [((), ((0, 2),)), ((), ((1, 3),))],
    ),
}


@pytest.mark.parametrize(("geometry", "split", "expected"), CASES.values(), ids=CASES)
def test_matrices_are_assembled_by_their_holders(
    geometry: Geometry, split: bool, expected: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]
) -> None:
    assert list(assemblies(geometry, split)) == [Assembly(*assembly) for assembly in expected]
