"""Storage of ranks under PyTorch's placements and ranges of rows, ranks with a whole matrix, and matrices."""

from collections import Counter
from itertools import pairwise, product
from math import prod

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.shared import muon_keywords
from tests.unit.plans import (
    FLAT,
    LARGE_MESHES,
    SQUARE,
    coordinates,
    elements_of,
    examples,
    layouts,
    parameter_lists,
    parameter_of,
    stacks,
    torch_local,
)
from titan_muon import Muon
from titan_muon.engine.layout.intervals import Geometry, check_rows, spans
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
from titan_muon.engine.tensors.dtensor import planned
from titan_muon.matrices.stacks import check_splits, stack_of
from titan_muon.options import Split


def indices(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


@examples(150)
@given(st.data())
def test_a_piece_maps_local_storage_to_matrix_elements(data: st.DataObject) -> None:
    shape, stack = data.draw(stacks("p"))
    mesh = data.draw(st.sampled_from(LARGE_MESHES))
    check_pieces(data.draw(layouts(shape, Mesh(mesh, tuple(range(prod(mesh)))))), stack)


def check_pieces(layout: Layout, stack: MatrixStack) -> None:
    """Each segment of a piece names the same element in the rank's 2D storage and in the whole matrix."""
    shape, geometry = layout.shape, Geometry(layout, stack)
    full = indices(shape)
    rows = full.reshape(prod(shape[: stack.row_dims]), -1)
    for rank, coordinate in coordinates(layout.mesh):
        local = torch_local(layout, coordinate, full)
        assert geometry.local_shape(rank) == tuple(local.shape)
        flat = local.reshape(prod(local.shape[: stack.row_dims]), prod(local.shape[stack.row_dims :]))
        seen = 0
        for index, piece in geometry.pieces(rank).items():
            matrix = elements_of(rows, stack.matrices[index])
            for span in spans(piece):
                assert torch.equal(flat[span.local], matrix[span.whole])
            assert geometry.elements(index)[rank] == piece.numel > 0
            seen += piece.numel
        assert seen == local.numel()


# Groups that assemble a matrix: none if a rank stores all of the matrix, and no more ranks than the mesh


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
            elements, numel = geometry.elements(index), prod(geometry.shape(index))
            assert bool(assembly.local) != bool(assembly.groups), "a matrix is at home or travels"
            assert set(assembly.local) <= set(elements)
            assert all(elements[rank] == numel for rank in assembly.local)
            for group in assembly.groups:
                assert list(group) == sorted(set(group))
                assert set(group) <= set(geometry.layout.mesh.ranks)
                assert len({geometry.tensor[rank] for rank in group}) == 1, "separate tensors are never assembled"
                held = Counter[tuple[int, ...]]()
                for rank in set(group) & set(elements):
                    held[geometry.replica[rank]] += elements[rank]
                assert set(held.values()) == {numel}, "every copy of the matrix is whole within the group"
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


MESHES = ((1,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Layout, MatrixStack]:
    """A layout with at least one axis that cuts rows, each replica alike, and matrices of neighbouring rows."""
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 8)))
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.lists(st.sampled_from((Shard(0), Shard(0), Shard(1), Replicate())), min_size=len(mesh), max_size=9))
    placements = (Shard(0), *axes[1 : len(mesh)])
    cuts = [size for size, placement in zip(mesh, placements, strict=True) if placement == Shard(0)]
    points = st.lists(st.integers(0, shape[0]), min_size=prod(cuts) - 1, max_size=prod(cuts) - 1)
    parts = [Interval(*pair) for pair in pairwise([0, *sorted(draw(points)), shape[0]])]
    # Any order of the parts over the ranks.
    places = dict(zip(product(*map(range, cuts)), draw(st.permutations(parts)), strict=True))
    on = Mesh(mesh, tuple(draw(st.permutations(range(prod(mesh))))))
    rows = tuple(
        places[tuple(i for i, placement in zip(coordinate, placements, strict=True) if placement == Shard(0))]
        for coordinate in on.coordinates.values()
    )
    bounds = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=3))})
    matrices = tuple(MatrixRows(str(i), (Interval(*pair),)) for i, pair in enumerate(pairwise(bounds)))
    return Layout(shape, on, placements, rows=rows), MatrixStack(1, matrices)


@examples(200)
@given(ranges())
def test_ranks_have_the_pieces_of_their_rows_and_groups_have_whole_matrices(case: tuple[Layout, MatrixStack]) -> None:
    check_rows(case[0])
    check_pieces(*case)
    check_assemblies(Geometry(*case))


# The matrices of a parameter: by default, and by einops notation


def test_by_default_a_parameter_is_a_matrix_or_a_stack() -> None:
    for shape, blocks in (((6, 4), [(0, 6)]), ((3, 2, 5), [(0, 2), (2, 4), (4, 6)])):
        assert [block.rows for block in stack_of("w", shape).matrices] == [(Interval(*rows),) for rows in blocks]
    parameter = planned("layers.3.mlp.w", torch.zeros(4, 2), stack_of("w", (4, 2)))
    assert (parameter.fqn, parameter.layer, parameter.plain) == ("layers.3.mlp.w", "layers.3", True)
    assert parameter.layout == Layout((4, 2), Mesh((1,), (0,)), (Replicate(),))


def test_the_first_matching_split_decides_and_every_split_has_a_match() -> None:
    other, whole = Split(match="other", dims="f d -> | f d"), Split(match="*", dims="f d -> | f d")
    split = Split(match="*.w", dims="(p f) d -> p | f d", lengths={"p": 2})
    assert len(stack_of("layers.0.w", (6, 4), [other, split, whole]).matrices) == 2
    assert len(stack_of("layers.0.w", (6, 4), [other, whole, split]).matrices) == 1
    check_splits(["layers.0.w"], [split, whole])


READ = [
    ((8, 6), "(h f) d -> h | f d", {"h": 4}),
    ((2, 10, 8), "g f d -> g | f d", {}),
    ((10, 2, 8), "f g d -> g | f d", {}),
    ((3, 5, 2, 8), "e f g d -> e g | f d", {}),
    ((3, 4, 10), "e d (f g) -> e g | d f", {"g": 2}),
    ((3, 10, 4), "e (f g) d -> e g | f d", {"f": 5}),
    ((6, 3, 2, 2), "o i h w -> | o (i h w)", {}),
    ((4, 3, 2, 5), "d p h k -> p h | d k", {}),
    ((24, 4), "(n p k) d -> p | (n k) d", {"p": 3, "k": 4}),
]


def matrices(shape: tuple[int, ...], dims: str, lengths: dict[str, int | tuple[int, ...]]) -> list[Tensor]:
    stack = stack_of("w", shape, [Split(match="*", dims=dims, lengths=lengths)])
    full = torch.arange(prod(shape)).reshape(prod(shape[: stack.row_dims]), -1)
    return [elements_of(full, matrix) for matrix in stack.matrices]


@pytest.mark.parametrize(("shape", "dims", "lengths"), READ, ids=[dims for _, dims, _ in READ])
def test_matrices_equal_einops(shape: tuple[int, ...], dims: str, lengths: dict[str, int]) -> None:
    left, _, right = dims.partition("->")
    count, _, matrix = right.partition("|")
    full = torch.arange(prod(shape)).reshape(shape)
    expected = rearrange(full, f"{left} -> ({count}) {matrix}", **lengths)
    result = torch.stack(matrices(shape, dims, dict(lengths)))
    assert torch.equal(result, expected)


def test_a_list_of_lengths_is_parts_of_unequal_size() -> None:
    """Two groups of 2 + 1 + 1 heads of 3 rows: q, k and v are a matrix each."""
    q, k, v = matrices((24, 2), "(g p h) d -> p | (g h) d", {"p": (2, 1, 1), "h": 3})
    groups = torch.arange(48).view(2, 4, 3, 2)
    assert torch.equal(q, groups[:, :2].reshape(12, 2))
    assert torch.equal(k, groups[:, 2].reshape(6, 2))
    assert torch.equal(v, groups[:, 3].reshape(6, 2))


@pytest.mark.parametrize("dim", range(4))
def test_interleaved_pieces_are_few_rectangles(dim: int) -> None:
    """However experts' gate and up, (E, F, 2, D), are cut, a copy moves more than a row."""
    shape = (2, 64, 2, 8)
    stack = stack_of("w", shape, [Split(match="*", dims="e f g d -> e g | f d")])
    geometry = Geometry(Layout(shape, Mesh((2,), (0, 1)), (Shard(dim),)), stack)
    for rank in range(2):
        assert all(len(piece.rows) * len(piece.cols) == 1 for piece in geometry.pieces(rank).values())


def test_the_scale_follows_the_shape_of_the_matrix_not_of_the_storage() -> None:
    """A layer stored as (in, out) trains like the transpose."""
    values, grad = torch.randn(4, 12), torch.randn(4, 12)
    stored, turned = nn.Parameter(values.clone()), nn.Parameter(values.T.contiguous())
    stored.grad, turned.grad = grad.clone(), grad.T.contiguous()
    options = {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped", "orthogonalize": "reference"}
    Muon([("w", stored)], **muon_keywords(**options, split=[Split(match="w", dims="d f -> | f d")])).step()
    Muon([("w", turned)], **muon_keywords(**options)).step()
    assert torch.equal(stored, turned.T)


def test_a_step_goes_on_after_a_refusal_to_offload_matrices_with_shared_rows() -> None:
    parameter = nn.Parameter(torch.zeros(6, 6))
    split = [Split(match="*", dims="(f g) d -> g | f d", lengths={"g": 2})]
    optimizer = Muon([("layers.0.w", parameter)], split=split)
    with pytest.raises(ValueError, match="share rows"):
        optimizer.offload()
    parameter.grad = torch.ones(6, 6)
    optimizer.step()
