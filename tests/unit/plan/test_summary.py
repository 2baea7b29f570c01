"""A plan's numbers equal the numbers of the programs; only equal plans have equal digests."""

import json
import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds import least_flops, least_sent
from tests.machines import rates
from tests.unit.plans import (
    EXCHANGES,
    SQUARE,
    examples,
    matrix,
    mesh_of,
    mixed_work,
    parameter_lists,
    plan_of,
    plans,
    ranks_of,
)
from titan_muon.engine.exchange.exchange import bucket_buffers, wire_dtypes
from titan_muon.engine.layout.intervals import Geometry
from titan_muon.engine.layout.types import (
    Layout,
    Matrix,
    Parameter,
    Placement,
    Plan,
    Replicate,
    Shard,
    StridedShard,
)
from titan_muon.engine.program.phases import BucketProgram
from titan_muon.engine.program.program import Program, batches, make_program
from titan_muon.options import MuonOptions, OptionError
from titan_muon.planner.planner import make_plan
from titan_muon.planner.summary import RankCost, summarize
from titan_muon.planner.totals import Flows
from titan_muon.planner.walk import PlanCost


def counted(plan: Plan, rank: int) -> RankCost:
    """Cost of a rank from its program and the exchange's buffers."""
    program = make_program(plan, rank)
    widths = [plan.wire_bytes(run.bucket) for run in program.buckets]
    ways = [traffic(run, rank) for run in program.buckets]
    sent, received = (sum(way[end] * width for way, width in zip(ways, widths, strict=True)) for end in (0, 1))
    parts = [run.matrices for run in program.buckets]
    mine = [matrix for part in parts for matrix in part]
    stacks = [batch for part in parts for batch in batches(part, plan.matrices, plan.works)]
    nbytes = [m.numel * plan.works[m.work].wire_bytes for m in plan.matrices]
    whole = max((sum(nbytes[m] for m in batch) for batch in stacks), default=0)
    stored = [sum(parcel.piece.numel for parcel in run.stored) for run in program.buckets]
    return RankCost(
        rank=rank,
        matrices=len(mine),
        ns_flops=sum(plan.matrices[m].flops for m in mine),
        bytes_sent=sent,
        bytes_received=received,
        buffer_bytes=buffer_bytes(plan, program),
        work_bytes=whole
        + max(
            iteration_bytes(plan, [[plan.matrices[m] for m in together] for together in parts]),
            # Calls for the momentum and for the weights: float32, of 2**23 elements or a row.
            4 * min(max(stored, default=0), 2**23),
        ),
        collectives=sum(
            phase.travels * (1 + (phase.hop is not None)) for run in program.buckets for phase in run.phases
        ),
        buckets=len(stored),
        bucket_elements=max(stored, default=0),
        state_elements=sum(stored),
        owned_elements=sum(plan.matrices[m].numel for m in mine),
    )


def iteration_bytes(plan: Plan, parts: list[list[Matrix]]) -> int:
    """In bfloat16 X, the next X, X Xᵀ and the polynomial of the largest stack.

    The local matrices are a part, and so is each run. Of n matrices of a shape in a part, ceil(n / ceil(n / batch)) are
    stacked.
    """
    iteration = 0
    for together in parts:
        for (rows, cols, work), count in Counter((m.rows, m.cols, m.work) for m in together).items():
            stacked = math.ceil(count / math.ceil(count / plan.works[work].batch))
            iteration = max(iteration, stacked * (2 * rows * cols + 2 * min(rows, cols) ** 2))
    return iteration * 2


def traffic(run: BucketProgram, rank: int) -> tuple[int, int]:
    """Elements sent and received by a rank in a run."""
    if run.bucket.exchange in ("all_to_all", "hierarchical", "two_hops"):
        gathering, back = run.gathering, run.returning
        if (hop := gathering.hop) is not None:
            rail, node = hop.rail.index(rank), hop.node.index(rank)
            over_rail, in_node = (
                (gathering.home_splits, hop.arriving_splits),
                (hop.departing_splits, gathering.owned_splits),
            )
            ends = [(splits, rail) for splits in over_rail] + [(splits, node) for splits in in_node]
            both = sum(sum(splits) - splits[me] for splits, me in ends)
            return both, both
        sent = sum(gathering.home_splits) + sum(back.owned_splits)
        received = sum(gathering.owned_splits) + sum(back.home_splits)
        if (shared := run.replica_gather) is None:
            return sent, received
        return sent + shared.home_numel * (len(shared.group) - 1), received + shared.owned_numel - shared.home_numel
    mine, total, others = run.gathering.home_numel, run.gathering.owned_numel, len(run.bucket.group) - 1
    there_and_back = (mine * others + total - mine, total - mine + mine * others)
    return there_and_back if run.returning is not None else (mine * others, total - mine)


def buffer_bytes(plan: Plan, program: Program) -> int:
    made = bucket_buffers(program, torch.device("meta"), wire_dtypes(plan, program))
    blocks = {id(buffers.block): buffers.block for buffers in made if buffers is not None}
    return sum(block.nbytes for block in blocks.values())


@examples(125)
@given(plans())
def test_every_ranks_cost_equals_the_program_cost(plan: Plan) -> None:
    summary = summarize(plan)
    assert summary.ranks == tuple(counted(plan, rank) for rank in ranks_of(plan))
    assert summary.muon_matrices == len(plan.matrices)
    assert summary.orthogonalizations == sum(cost.matrices for cost in summary.ranks)
    for name in ("bytes_sent", "buffer_bytes"):
        assert getattr(summary, f"{name}_max") == max(getattr(cost, name) for cost in summary.ranks)
    assert summary.collectives_per_step == max(cost.collectives for cost in summary.ranks)
    assert sum(cost.bytes_sent for cost in summary.ranks) == sum(cost.bytes_received for cost in summary.ranks)
    assert least_flops(plan) <= summary.ns_flops_max
    assert least_sent(plan) <= summary.bytes_sent_max


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shard_0_sends_every_element_once_in_both_directions(ranks: int) -> None:
    """Mean bytes sent of even Shard(0): exactly 2 (N-1)/N x P b / N, for any owners; the lower bound."""
    shapes = [(16, 24), (8, 40), (32, 8), (24, 24), (8, 8)]
    plan = plan_of([matrix(i, rows, cols, mesh_of(ranks)) for i, (rows, cols) in enumerate(shapes)])
    elements = sum(rows * cols for rows, cols in shapes)
    summary = summarize(plan)
    sent = sum(cost.bytes_sent for cost in summary.ranks)
    assert sent * ranks == 2 * (ranks - 1) * 2 * elements
    assert least_sent(plan) == sent // ranks


def test_planning_makes_few_objects_for_ranks_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the ranks, of which most own nothing: no more totals, shares, and pieces."""
    made = Counter[str]()

    def counted_calls(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **words: (made.update([name]), function(*args, **words))[1])

    counted_calls(Flows, "of_rank")
    counted_calls(Geometry, "_pieces_of")
    before = Counter[str]()
    for ranks in (2048, 8192):
        made.clear()
        plan = plan_of([matrix(i, 512 << i % 2, 512, mesh_of(ranks)) for i in range(4)])
        cost = PlanCost.from_plan(plan, rates())
        made["shares"] = len({share for shares in cost.by_class for share in shares})
        made["classes"] = len(cost.by_class)
        assert len(cost.class_of) == ranks
        assert before == Counter() or made == before
        before = Counter(made)
    assert before["_pieces_of"] == 0
    assert before.pop("of_rank") <= 400, "of all candidates together"
    assert max(before.values()) <= 50


@examples(75)
@given(parameter_lists(), st.sampled_from([128, 256, 512, 1024]), st.sampled_from(EXCHANGES))
def test_the_users_buffer_limit_bounds_every_plan(parameters: list[Parameter], budget: int, exchange: str) -> None:
    try:
        options = MuonOptions(buffer_gib=budget / 2**30, exchange=exchange)
        plan = make_plan(parameters, mixed_work, options)
    except OptionError:
        return
    assert summarize(plan).buffer_bytes_max <= budget


@examples(50)
@given(plans())
def test_json_survives_a_round_trip(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert set(data) == {field.name for field in fields(Plan)}
    assert [bucket["matrices"] for bucket in data["buckets"]] == [list(bucket.matrices) for bucket in plan.buckets]
    assert len(data["parameters"]) == len(plan.parameters)
    assert plan.to_json() == replace(plan).to_json()


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (StridedShard(0, 2), Shard(0)), (Replicate(), Shard(0))])
def test_digests_distinguish_placements(placements: tuple[Placement, ...]) -> None:
    plan, other = (replace(plan_of([matrix(0, 8, 8, SQUARE, Shard(0), Shard(0))]), matrices=()) for _ in range(2))
    layout = Layout((8, 8), SQUARE, placements)
    other = replace(other, parameters=(replace(other.parameters[0], layout=layout),))
    assert plan.digest() != other.digest()
