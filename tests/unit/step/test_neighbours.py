"""Equal pieces at equal distances are one copy, and an owner gets neighbours of a stack."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from tests.unit.plans import mesh_of, parameter_of, plan_of
from titan_muon.engine.exchange.exchange import BufferPiece, Buffers, wire_dtypes
from titan_muon.engine.layout.intervals import Geometries, Pieces, spans
from titan_muon.engine.layout.types import Bucket, Plan, Shard
from titan_muon.engine.planning import in_order
from titan_muon.engine.program.patterns import PATTERNS
from titan_muon.engine.program.program import make_program
from titan_muon.engine.step.foreach import joined
from titan_muon.engine.step.views import strided
from titan_muon.planner.timeline import listed_parts


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


@pytest.mark.parametrize("experts", [12, 2, 32])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_the_host_time_counts_the_parts_of_the_lists(experts: int, placement: Shard) -> None:
    stacks = [parameter_of(f"layers.{n}.experts", (experts, 12, 8), mesh_of(4), placement) for n in range(2)]
    plan = plan_of([*stacks, parameter_of("layers.0.w", (12, 8), mesh_of(4), Shard(0))])
    counts = listed_parts(plan, Pieces(plan.matrices, Geometries(plan.parameters)))
    for rank in range(4):
        program = make_program(plan, rank)
        buffers, parts = Buffers(program, torch.device("cpu"), wire_dtypes(plan, program), kept=True), 0
        for run, views in zip(program.buckets, buffers.buckets, strict=True):
            matrices = [plan.matrices[parcel.matrix] for parcel in run.stored]
            shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
            # Local matrices are neighbours in the workspace.
            whole = torch.zeros(len(matrices), *shapes[0]) if views is None else ()
            held = whole if views is None else [piece.view for piece in views.stored]
            parts += len(
                joined(
                    (
                        BufferPiece(parcel.matrix, spans(parcel.piece), view)
                        for parcel, view in zip(run.stored, held, strict=True)
                    ),
                    lambda number: (plan.matrices[number].parameter, plan.out_in(number)),
                )
            )
        assert counts[rank] - 2 * len(plan.buckets) <= parts <= counts[rank] + 2 * len(plan.buckets)
        assert parts < len(plan.matrices) / 2 or experts == 2


def assert_neighbours(plan: Plan) -> None:
    """The matrices of each owner in a bucket follow each other."""
    for bucket in plan.buckets:
        assert list(bucket.matrices) == sorted(bucket.matrices)
        changes = sum(before != after for before, after in pairwise(bucket.owners))
        assert changes == len(Counter(bucket.owners)) - 1
