"""Groups that assemble a matrix: none if a rank stores all of the matrix, and no more ranks than the mesh."""

from collections.abc import Iterable

import pytest
from hypothesis import given

from tests.unit.plans import examples, parameter_lists
from titan_muon.plan.terms.layout import Geometry
from titan_muon.plan.terms.pieces import Assembly, assemblies
from titan_muon.plan.terms.types import (
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

FLAT = Mesh((4,), (0, 1, 2, 3))
SQUARE = Mesh((2, 2), (0, 1, 2, 3))


def experts(count: int, rows: int, cols: int, mesh: Mesh, *placements: Placement) -> Geometry:
    matrices = tuple(MatrixRows(str(i), (Interval(i * rows, (i + 1) * rows),)) for i in range(count))
    return Geometry(Layout((count, rows, cols), mesh, placements), MatrixStack(2, matrices))


def matrix(rows: int, mesh: Mesh, *placements: Placement) -> Geometry:
    return Geometry(Layout((rows, 4), mesh, placements), MatrixStack(1, (MatrixRows("", (Interval(0, rows),)),)))


def copies(geometry: Geometry, ranks: Iterable[int]) -> set[tuple[int, ...]]:
    return {geometry.replica[rank] for rank in ranks}


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


@pytest.mark.parametrize(
    ("geometry", "split", "expected"),
    [
        pytest.param(experts(4, 3, 5, FLAT, Shard(0)), True, [((rank,), ()) for rank in ALL], id="whole experts"),
        # By rows: the flattened rows do not matter, dim 0 is cut 1, 1, 1, 0.
        pytest.param(experts(3, 2, 5, FLAT, Shard(0)), True, [((rank,), ()) for rank in ALL[:3]], id="fewer experts"),
        pytest.param(
            experts(2, 4, 5, SQUARE, Shard(1), Shard(0)), True, [((), ((0, 2),)), ((), ((1, 3),))], id="rows of experts"
        ),
        # The rank without a row may orthogonalize too.
        pytest.param(matrix(3, FLAT, Shard(0)), True, [((), (ALL,))], id="3 rows over 4 ranks"),
        pytest.param(matrix(1, FLAT, Shard(0)), True, [((0,), ())], id="a single row"),
        pytest.param(matrix(8, SQUARE, Replicate(), Shard(0)), True, [((), (ALL,))], id="replicas share work"),
        pytest.param(matrix(8, SQUARE, Replicate(), Shard(0)), False, [((), ((0, 1), (2, 3)))], id="replicas repeat"),
        pytest.param(matrix(8, FLAT, Replicate()), True, [((), (ALL,))], id="whole replicas share work"),
        pytest.param(matrix(8, FLAT, Replicate()), False, [(ALL, ())], id="whole replicas repeat"),
        # TP by rows: head 0 is on ranks 0 and 2, head 1 on ranks 1 and 3.
        pytest.param(
            Geometry(Layout((8, 4), SQUARE, (Shard(1), Shard(0))), HEADS),
            True,
            [((), ((0, 2),)), ((), ((1, 3),))],
            id="heads over FSDP x TP",
        ),
    ],
)
def test_matrices_are_assembled_by_their_holders(
    geometry: Geometry, split: bool, expected: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]
) -> None:
    assert list(assemblies(geometry, split)) == [Assembly(*assembly) for assembly in expected]
