"""A plan's numbers equal the numbers of the programs, and its simulated time is right; digests distinguish plans."""

import json
import math
import re
from collections import Counter
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds import chains, least_flops, least_seconds, least_sent, least_whole
from tests.machines import machine_file, rates
from tests.unit.plans import (
    EXCHANGES,
    SQUARE,
    either_plan,
    examples,
    matrix,
    mesh_of,
    mixed_work,
    parameter_lists,
    plan_of,
    plans,
    ranks_of,
    searched,
)
from titan_muon.engine.exchange.exchange import bucket_buffers, wire_dtypes
from titan_muon.engine.layout.intervals import Geometry
from titan_muon.engine.layout.types import Layout, Matrix, Parameter, Placement, Plan, Replicate, Shard, StridedShard
from titan_muon.engine.program.phases import BucketProgram
from titan_muon.engine.program.program import Program, batches, make_program
from titan_muon.options import Machine, MuonOptions, OptionError, Overlap
from titan_muon.planner.machine import (
    COLLECTIVE_OPERATORS,
    MACHINES,
    STEP_OPERATORS,
    Link,
    MachineRates,
    planning_machine,
)
from titan_muon.planner.search import CandidatePlan
from titan_muon.planner.summary import RankCost, summarize
from titan_muon.planner.timeline import timeline
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
    """In bfloat16 X, the next X, X Xᵀ and the polynomial of the largest stack: ceil(n / ceil(n / batch)) matrices."""
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
        plan = searched(parameters, mixed_work, options)
    except OptionError:
        return
    assert summarize(plan).buffer_bytes_max <= budget


@examples(50)
@given(parameter_lists(), st.sampled_from(["all_to_all", "all_gather"]))
def test_the_rule_refuses_a_buffer_limit_below_the_fullest_rank(parameters: list[Parameter], exchange: str) -> None:
    options = MuonOptions(planner="rule", exchange=exchange)
    if fullest := summarize(either_plan(parameters, None, options)).buffer_bytes_max:
        either_plan(parameters, None, replace(options, buffer_gib=fullest / 2**30))
        with pytest.raises(OptionError, match="too small"):
            either_plan(parameters, None, replace(options, buffer_gib=(fullest - 1) / 2**30))


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


# Simulated plans: durations, hidden time, and the choice of faster plans

# A single resource takes time, so that expected times are simple.
FREE = MachineRates(
    "free",
    dict.fromkeys(("bfloat16", "float16", "float32"), 1e30),
    1e30,
    ranks_per_node=8,
    half_side=0,
    node=Link(1e30, 0),
    network=Link(1e30, 0),
    launch=0,
)


def parameters(count: int, ranks: int) -> list[Parameter]:
    """64 x 64 matrices cut into rows over all ranks."""
    return [matrix(index, 64, 64, mesh_of(ranks)) for index in range(count)]


def seconds(plan: Plan, machine: MachineRates) -> float:
    return timeline(plan, machine).last.seconds


@pytest.fixture
def plan() -> Plan:
    """Four matrices over four ranks in a round: each rank owns one."""
    return plan_of(parameters(4, 4), machine=rates(node_latency_us=1e6))


def test_the_timeline_counts_every_cost(plan: Plan) -> None:
    assert plan.rounds == 1, "one call each way, where calls alone cost"
    flops, elements = plan.matrices[0].flops, 64 * 64
    assert seconds(plan, FREE) == pytest.approx(0, abs=1e-12)
    assert seconds(plan, replace(FREE, flops={"bfloat16": flops})) == pytest.approx(1)
    assert seconds(plan, replace(FREE, node=Link(1e30, 3))) == pytest.approx(6)
    # A rank gathers three quarters of a matrix, and sends as much back; bfloat16 elements are two bytes.
    assert seconds(plan, replace(FREE, node=Link(elements * 2, 0))) == pytest.approx(1.5)
    # 30 bytes to advance and pack, 26 to decay and apply, four times 2 to assemble and split matrices, and 10 to
    # normalize.
    assert seconds(plan, replace(FREE, memory=elements)) == pytest.approx(30 + 26 + 8 + 10)
    # A rank sends to three others, and receives from three, in each of two collectives.
    assert seconds(plan, replace(FREE, node=Link(1e30, 0, 0.5))) == pytest.approx(3)


def test_host_time_is_a_separate_bound(plan: Plan) -> None:
    """Four stored pieces, a batch of Newton-Schulz and two collectives on each rank."""
    played = timeline(plan, replace(FREE, host=1, host_entry=1000))
    # 20 of Newton-Schulz and 7 around the batch, 3 to advance and 3 to apply.
    assert played.last.operators == 20 + 7 + 3 + 3 + STEP_OPERATORS
    assert played.host == 4 * 13 * 1000 + played.last.operators + 2 * COLLECTIVE_OPERATORS
    assert played.last.seconds == pytest.approx(0, abs=1e-12)


def test_small_matrices_fill_the_memory_of_the_largest_where_launches_cost() -> None:
    """The memory of a step stays, with fewer batches: 16 matrices of 16 x 16 take as much as one of 64 x 64."""
    small = [matrix(index, 16, 16, mesh_of(1)) for index in range(32)]
    plan = plan_of([*parameters(1, 1), *small])
    assert sorted(work.batch for work in plan.works) == [3, 16], "the three that this work allows"


def test_the_network_link_carries_only_bytes_between_nodes(plan: Plan) -> None:
    slow = Link(64 * 64 * 2, 0)
    assert seconds(plan, replace(FREE, network=slow)) == pytest.approx(0, abs=1e-12)
    # Two of the four quarters are on the other node.
    assert seconds(plan, replace(FREE, ranks_per_node=2, network=slow)) == pytest.approx(1)
    assert seconds(plan, replace(FREE, ranks_per_node=2, node=slow)) == pytest.approx(0.5)


def test_three_buffer_sets_hide_a_return_behind_the_next_round() -> None:
    """Rounds of 1 s of Newton-Schulz, 0.4 s there and 0.4 s back: only the first and the last way are not hidden."""
    plan, machine = four_rounds()
    took = {buffer_sets: seconds(replace(plan, buffer_sets=buffer_sets), machine) for buffer_sets in (1, 3)}
    assert took == pytest.approx({1: 4 * 1.8, 3: 4.8})


def test_forward_overlap_exposes_only_the_first_round() -> None:
    plan, machine = four_rounds()
    one, four = (timeline(replace(plan, buffer_sets=sets), machine, overlap="forward") for sets in (1, 4))
    # The first way there, and then the ranks compute; the first results were back long before.
    assert (four.last.seconds, four.hidden, four.exposed) == pytest.approx((4.4, 0.4, 0.4))
    # With a single set of buffers each round but the last returns before the next gather.
    assert (one.last.seconds, one.link) == pytest.approx((3 * 1.8 + 1.4, 8 * 0.4 - 0.4))


def four_rounds() -> tuple[Plan, MachineRates]:
    """Four rounds of one matrix per rank, in the order of forward, and a machine with 1 s of
    Newton-Schulz for each and 0.4 s each way."""
    plan = plan_of(parameters(16, 4), machine=rates(node_latency_us=1e6))
    bucket = plan.buckets[0]
    matrices = [range(start, start + 4) for start in (0, 4, 8, 12)]
    buckets = tuple(replace(bucket, matrices=tuple(of), owners=(0, 1, 2, 3), round=k) for k, of in enumerate(matrices))
    machine = replace(FREE, flops={"bfloat16": plan.matrices[0].flops}, node=Link(64 * 64 * 1.5 / 0.4, 0))
    return replace(plan, buckets=buckets), machine


@examples(60)
@given(plans())
def test_no_wait_is_negative_and_no_step_beats_the_lower_bounds(plan: Plan) -> None:
    """For any buckets, owners and rounds."""
    for machine in (MACHINES["h100x8"], replace(MACHINES["cpu"], ranks_per_node=2, launch=0)):
        costs, took = PlanCost.from_plan(plan, machine).costs, seconds(plan, machine)
        least = least_whole(chains(plan.buckets, costs), [0.0] * len(costs.pieces.ranks()), 100 * took)
        assert took >= least * (1 - 1e-9)
        for overlap in get_args(Overlap):
            played = timeline(plan, machine, overlap=overlap)
            assert all(rank.waits >= -1e-12 for rank in played.ranks)
            bound, step = least_seconds(plan, machine, played), played.last.seconds
            assert bound >= max(played.least, played.link)
            assert step >= bound * (1 - 1e-9)
            assert step >= max(rank.orthogonalize + rank.passes for rank in played.ranks) - 1e-12
            assert 0 <= played.tail <= step - max(rank.orthogonalize for rank in played.ranks) + 1e-12
            assert -1e-12 <= played.exposed <= step + 1e-12
            assert timeline(plan, machine, overlap=overlap) == played


def test_a_plan_overlaps_equal_link_and_compute_times() -> None:
    """By FLOPs, one round suffices; on this machine a single round takes nearly twice as long as several."""
    tasks = parameters(64, 4)
    machine = rates(node_gb=1e-3, node_latency_us=0, launch_us=0, tflops=3.3e-3, memory_gb=1e6)
    chosen = plan_of(tasks, machine=machine)
    single = plan_of(tasks, machine=rates(node_latency_us=1e9))
    assert (single.rounds, chosen.rounds > 2) == (1, True)
    assert seconds(chosen, machine) < 0.75 * seconds(single, machine)


def test_memory_beyond_2_gib_must_save_more_time_and_is_reported() -> None:
    """Matrices of 1 GiB, with four times as much memory for Newton-Schulz."""
    side = 2**14 * 3 // 2
    plan = plan_of([matrix(i, side, side) for i in range(16)])
    assert re.search(r"(^|; )\d+\.\d GiB of buffers and workspace, since with \d+\.\d GiB a step would", plan.reason)
    assert not plan_of(parameters(4, 4)).reason
    prices = [CandidatePlan((), 3, 1.0, 0, gib * 2**30, 0.0).price for gib in (1, 2, 3)]
    assert prices == pytest.approx([1, 1.03, 1.13])


def test_a_file_and_ranks_per_node_override_the_named_machine() -> None:
    wanted = rates("h200x8", ranks_per_node=4, tflops=100, network_gb=20, node_latency_us=3, launch_us=2)
    options = machine_file("h200x8", ranks_per_node=4, tflops=100, network_gb=20, node_latency_us=3, launch_us=2)
    assert planning_machine(options, "cuda") == wanted != MACHINES["h200x8"]
    without_links = {"flops": dict(wanted.flops), "memory_bandwidth": 1e12}
    machine = planning_machine(Machine(name="h200x8", file="x.json"), "cuda", json.dumps(without_links))
    assert machine == replace(MACHINES["h200x8"], flops=wanted.flops, memory=1e12)
