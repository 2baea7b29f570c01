"""Equal pieces at equal distances are one copy, and an owner gets neighbours of a stack."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from tests.unit.plans import mesh_of, parameter_of, plan_of
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Bucket, Plan, Shard
from titan_muon.engine.planning import in_order
from titan_muon.engine.program.patterns import PATTERNS
from titan_muon.engine.step.views import strided


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [0, 3, 15])
@pytest.mark.parametrize("cols", [4, 3])
def test_pieces_of_all_ranks_are_assembled_in_at_most_three_copies(dtype: torch.dtype, own: int, cols: int) -> None:
    """Four matrices from 16 ranks. The own pieces come first in the buffer."""
    matrices, ranks, rows = 4, 16, 2
    buffer = torch.randn(matrices * ranks * rows * cols).to(dtype)
    pieces = buffer.view(ranks, matrices, rows, cols)
    order = [own, *(rank for rank in range(ranks) if rank != own)]
    whole, expected = (torch.zeros(matrices, ranks * rows, cols, dtype=dtype) for _ in range(2))
    pairs = [
        (pieces[place, matrix], whole[matrix, rank * rows : (rank + 1) * rows])
        for matrix in range(matrices)
        for place, rank in enumerate(order)
    ]
    for source, target in pairs:
        expected.view(-1).as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    copies = strided(pairs)
    assert len(copies) <= 3
    for source, target in copies:
        target.copy_(source)
    assert torch.equal(whole, expected)


def test_an_owner_gets_neighbours_at_the_cost_of_before() -> None:
    """Six ranks cut the rows of each of 12 experts. The search deals the experts in turn."""
    stack = parameter_of("layers.0.experts", (12, 12, 8), mesh_of(6), Shard(1))
    plan = plan_of([stack])
    assert_neighbours(plan)
    pieces = Pieces(plan.matrices, Geometries(plan.parameters))
    dealt = Bucket("all_to_all", tuple(range(6)), tuple(reversed(range(12))), tuple(n % 6 for n in range(12)))
    ordered = in_order(dealt, pieces, {})
    totals = [PATTERNS["all_to_all"].totals(bucket, pieces) for bucket in (dealt, ordered)]
    assert totals[0] == totals[1]
    assert ordered.owners == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert in_order(dealt, pieces, {0: (5,)}).owners[0] == 5, "an owner keeps a matrix that only it may own"


def assert_neighbours(plan: Plan) -> None:
    """The matrices of each owner in a bucket follow each other."""
    for bucket in plan.buckets:
        assert list(bucket.matrices) == sorted(bucket.matrices)
        changes = sum(before != after for before, after in pairwise(bucket.owners))
        assert changes == len(Counter(bucket.owners)) - 1
