"""Storage of ranks under PyTorch's placements, on any mesh."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.plans import LARGE_MESHES, coordinates, elements_of, examples, layouts, stacks, torch_local
from titan_muon.engine.layout.intervals import Geometry, chunk, region, spans
from titan_muon.engine.layout.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Shard, StridedShard

LARGEST = {1: 30, 2: 30, 3: 12, 4: 6}


@st.composite
def cases(draw: st.DrawFn) -> Layout:
    ndim = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, LARGEST[ndim]), min_size=ndim, max_size=ndim))
    mesh = draw(st.sampled_from(LARGE_MESHES))
    return draw(layouts(shape, Mesh(mesh, tuple(range(prod(mesh))))))


def indices(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def at(full: Tensor, dims: tuple[tuple[Interval, ...], ...]) -> Tensor:
    """The elements of a tensor at the crossings of intervals of each dim."""
    for dim, intervals in enumerate(dims):
        full = full.index_select(dim, torch.tensor([i for a, b in intervals for i in range(a, b)], dtype=torch.long))
    return full


@examples(150)
@given(cases())
def test_a_rank_stores_the_shards_of_torch(layout: Layout) -> None:
    full = indices(layout.shape)
    for _, coordinate in coordinates(layout.mesh):
        assert torch.equal(at(full, region(layout, coordinate)), torch_local(layout, coordinate, full))


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


@pytest.mark.parametrize("length", [0, 1, 2, 5, 7, 30])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_chunk_equals_torchs_chunk(length: int, count: int) -> None:
    parts = [list(range(*chunk(length, count, index))) for index in range(count)]
    expected = [part.tolist() for part in torch.arange(length).chunk(count)] if length else []
    assert parts == expected + [[]] * (count - len(expected))


def test_fsdp_over_tensor_parallel_rows_interleaves() -> None:
    """Tensor parallelism halves 8 rows first, FSDP halves each half: dp 0 has rows 0-1 and 4-5 of the whole."""
    layout = Layout((8, 1), Mesh((2, 2), (0, 1, 2, 3)), (StridedShard(0, 2), Shard(0)))
    rows = [region(layout, coordinate)[0] for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert rows == [(Interval(0, 2),), (Interval(4, 6),), (Interval(2, 4),), (Interval(6, 8),)]


def test_matrices_in_reverse_storage_order_have_the_right_ranks() -> None:
    """Rows of a fused weight may alternate between the projections, and the second projection may come first."""
    stack = MatrixStack(1, (MatrixRows("b", (Interval(4, 8),)), MatrixRows("a", (Interval(0, 4),))))
    geometry = Geometry(Layout((8, 3), Mesh((4,), (0, 1, 2, 3)), (Shard(0),)), stack)
    assert [list(geometry.pieces(rank)) for rank in range(4)] == [[1], [1], [0], [0]]
