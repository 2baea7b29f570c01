"""Layouts whose ranks have any range of rows."""

from itertools import pairwise, product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.test_groups import check_assemblies
from tests.unit.plan.test_layout import check_pieces
from tests.unit.plans import examples
from titan_muon.engine.layout.intervals import Geometry, check_rows
from titan_muon.engine.layout.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Replicate, Shard

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


def test_each_replica_has_every_row() -> None:
    mesh, placements = Mesh((2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0))
    halves = Interval(0, 3), Interval(3, 12)
    check_rows(Layout((12, 4), mesh, placements, rows=(*halves, *halves)))
