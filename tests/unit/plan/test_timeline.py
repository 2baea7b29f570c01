"""Simulated plans: durations, hidden time, and the choice of faster plans."""

import json
import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given

from benchmarks.bounds import chains, least_seconds, least_whole
from tests.machines import machine_file, rates
from tests.unit.plans import examples, matrix, mesh_of, plan_of, plans
from titan_muon.engine.layout.types import Parameter, Plan
from titan_muon.options import Machine, Overlap
from titan_muon.planner.machine import (
    COLLECTIVE_OPERATORS,
    MACHINES,
    STEP_OPERATORS,
    Link,
    MachineRates,
    machine_of,
    planning_machine,
)
from titan_muon.planner.search import CandidatePlan
from titan_muon.planner.timeline import timeline
from titan_muon.planner.walk import PlanCost

# A single resource takes time, so that expected times are simple.
FREE = MachineRates(
    "free", 8, dict.fromkeys(("bfloat16", "float16", "float32"), 1e30), 0, 1e30, Link(1e30, 0), Link(1e30, 0), 0
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
    machine = machine_of(Machine(name="h200x8", file="x.json"), "cuda", json.dumps(without_links))
    assert machine == replace(MACHINES["h200x8"], flops=wanted.flops, memory=1e12)
