"""Layouts whose ranks have any range of rows."""

from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plans import coordinates, elements_of, examples
from titan_muon.plan.terms.layout import Geometry, check_rows, spans
from titan_muon.plan.terms.pieces import assemblies
from titan_muon.plan.terms.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Replicate, Shard

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
def test_pieces_are_the_elements_of_a_rank_and_tile_each_matrix(case: tuple[Layout, MatrixStack]) -> None:
    layout, stack = case
    check_rows(layout)
    geometry, full = Geometry(layout, stack), torch.arange(prod(layout.shape)).view(layout.shape)
    seen = {(index, replica): [] for index in range(len(stack.matrices)) for replica in geometry.replica.values()}
    for position, (rank, coordinate) in enumerate(coordinates(layout.mesh)):
        start, stop = layout.rows[position]
        local = full[start:stop]
        for axis, placement in enumerate(layout.placements):
            if placement == Shard(1):
                # Torch's chunk gives fewer parts of a small tensor.
                chunks = local.chunk(layout.mesh.shape[axis], 1)
                local = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else local[:, :0]
        assert geometry.local_shape[rank] == (stop - start if stop > start else 0, local.shape[1])
        for index, piece in geometry.pieces[rank].items():
            matrix = elements_of(full, stack.matrices[index])
            for span in spans(piece):
                assert torch.equal(local[span.local], matrix[span.whole])
            rows, cols = zip(*[(span.whole[0], span.whole[1]) for span in spans(piece)], strict=True)
            seen[index, geometry.replica[rank]] += [
                int(i) for r, c in zip(rows, cols, strict=True) for i in matrix[r, c].flatten()
            ]
    for (index, _), elements in seen.items():
        assert sorted(elements) == elements_of(full, stack.matrices[index]).flatten().tolist()


@examples(100)
@given(ranges())
def test_a_matrix_is_assembled_by_ranks_that_have_all_of_it(case: tuple[Layout, MatrixStack]) -> None:
    geometry = Geometry(*case)
    for split in (True, False):
        for index, assembly in enumerate(assemblies(geometry, split)):
            held = geometry.elements(index)
            for rank in assembly.local:
                assert held[rank] == geometry.numel(index)
            for group in assembly.groups:
                replicas = {geometry.replica[rank] for rank in held if rank in group}
                stored = sum(held.get(rank, 0) for rank in group)
                assert stored == geometry.numel(index) * len(replicas)


WRONG = {
    "a gap": ((0, 5), (6, 12)),
    "an overlap": ((0, 7), (5, 12)),
    "twice": ((0, 12), (0, 12)),
    "too many": ((0, 6), (6, 13)),
    "none": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG)
def test_ranges_that_are_not_every_row_once_are_refused(rows: tuple[tuple[int, int], ...]) -> None:
    layout = Layout((12, 4), Mesh((2,), (0, 1)), (Shard(0),), rows=tuple(Interval(*pair) for pair in rows))
    listed = ", ".join(f"{start}:{stop}" for start, stop in rows)
    with pytest.raises(ValueError, match=f"rows {listed}, which are not all 12 rows once"):
        check_rows(layout)


def test_each_replica_has_every_row() -> None:
    mesh, placements = Mesh((2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0))
    halves = Interval(0, 3), Interval(3, 12)
    check_rows(Layout((12, 4), mesh, placements, rows=(*halves, *halves)))
    with pytest.raises(ValueError, match="not all 12 rows once"):
        check_rows(Layout((12, 4), mesh, placements, rows=(halves[0], halves[0], halves[1], halves[1])))
