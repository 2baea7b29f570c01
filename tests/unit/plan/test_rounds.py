"""Rounds of the search: order, swaps of equal matrices; the plan by a fixed rule, and returns over replicas."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.machines import rates
from tests.shared import muon_keywords
from tests.unit.plan.test_summary import parameters
from tests.unit.plans import examples, matrix, mesh_of, plan_of, plans, work
from titan_muon import Muon
from titan_muon.engine.engine import plan_step
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Parameter, Plan, Replicate, Shard
from titan_muon.engine.layout.work import Elements
from titan_muon.engine.planning import MOST_ROUNDS, ROUND_BYTES, PlanRequest, Task, plan_by_rule
from titan_muon.options import Machine, MuonOptions
from titan_muon.planner.machine import MachineRates
from titan_muon.planner.search import in_model_order
from titan_muon.selection import select


def tasks_of(plan: Plan) -> tuple[list[list[Task]], dict[tuple[int, int], int]]:
    """The plan's rounds as tasks, and the owners."""
    groups = list(dict.fromkeys(bucket.group for bucket in plan.buckets))
    dealt: list[list[Task]] = [[] for _ in range(plan.rounds)]
    owners = {}
    for bucket in plan.buckets:
        group = groups.index(bucket.group)
        for number, owner in zip(bucket.matrices, bucket.owners, strict=True):
            planned = plan.matrices[number]
            dealt[bucket.round].append(Task(number, group, planned.flops, planned.numel, ""))
            owners[number, group] = owner
    return dealt, owners


@examples(50)
@given(plans(exchanges=["all_to_all"]))
def test_model_order_follows_the_pass_and_keeps_the_cost_of_every_owner(plan: Plan) -> None:
    pieces, (dealt, owners) = Pieces(plan.matrices, Geometries(plan.parameters)), tasks_of(plan)
    ordered, owned = in_model_order(dealt, owners, pieces, {})
    assert sorted(task for tasks in ordered for task in tasks) == sorted(task for tasks in dealt for task in tasks)
    assert owned.keys() == owners.keys()
    for before, after in zip(dealt, ordered, strict=True):
        old, new = (
            Counter((of[task.matrix, task.group], task.group, pieces.kinds[task.matrix], task.flops) for task in tasks)
            for tasks, of in ((before, owners), (after, owned))
        )
        assert old == new, "each owner has as many of each kind in each round as before"
    kinds: dict[tuple[int, int], list[int]] = {}
    for tasks in ordered:
        for task in tasks:
            kinds.setdefault((task.group, pieces.kinds[task.matrix]), []).append(task.matrix)
    for matrices in kinds.values():
        assert matrices == sorted(matrices)


def test_a_matrix_stays_with_possible_owners() -> None:
    plan = plan_of(parameters(4, 4))
    pieces = Pieces(plan.matrices, Geometries(plan.parameters))
    dealt = [[Task(number, 0, 1, 1, "")] for number in (3, 2, 1, 0)]
    owners = {(number, 0): number for number in range(4)}
    candidates = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    ordered, owned = in_model_order(dealt, owners, pieces, candidates)
    assert [tasks[0].matrix for tasks in ordered] == [2, 3, 0, 1]
    assert owned == {(2, 0): 3, (3, 0): 2, (0, 0): 1, (1, 0): 0}
    assert all(rank in candidates[matrix] for (matrix, _), rank in owned.items())


# The plan by a fixed rule. Its plans are among those of `plans`, and rows of the parity table


def ruled(parameters: list[Parameter]) -> Plan:
    return plan_by_rule(PlanRequest(parameters, work, MuonOptions(planner="rule"), Elements()))


def test_owners_are_balanced_longest_first() -> None:
    plan = ruled([matrix(i, rows, 64) for i, rows in enumerate((64, 64, 32, 32, 32, 32, 32, 32))])
    flops = Counter[int]()
    for bucket in plan.buckets:
        for number, owner in zip(bucket.matrices, bucket.owners, strict=True):
            flops[owner] += plan.matrices[number].flops
    assert len(flops) == 4
    assert max(flops.values()) <= 4 / 3 * sum(flops.values()) / 4, "Graham, 1969"


@pytest.mark.parametrize(("rounds", "mib"), [(2, 1), (2, 128), (3, 192), (8, 512), (8, 4096)])
def test_a_round_has_64_mib_of_a_rank(rounds: int, mib: int) -> None:
    count, ranks = 64, 4
    rows = ranks * mib * 2**20 // (2 * count * 128)
    plan = ruled([matrix(i, rows, 128) for i in range(count)])
    assert (plan.rounds, plan.buffer_sets) == (rounds, min(3, rounds))
    assert rounds == max(2, min(MOST_ROUNDS, mib * 2**20 // ROUND_BYTES))


def test_small_matrices_are_first_and_last() -> None:
    plan = ruled([matrix(i, 64 * (1 + i // 4), 8 * 1024 * 1024 // 64) for i in range(32)])
    assert plan.rounds > 2
    rows = [
        max(plan.matrices[n].rows for b in plan.buckets if b.round == k for n in b.matrices) for k in range(plan.rounds)
    ]
    assert rows.index(max(rows)) not in (0, plan.rounds - 1)
    assert rows[0] < max(rows) > rows[-1]


def digest(planner: str, machine: Machine, device: str) -> str:
    params = [(f"w{i}", torch.nn.Parameter(torch.empty(4096, 64 << i, device="meta"))) for i in range(4)]
    muon = Muon(params, **muon_keywords(planner=planner, machine=machine, orthogonalize="auto"))
    groups, tensors = [muon.param_groups[0]] * len(params), [tensor for _, tensor in params]
    return plan_step(params, groups, select(muon.options, groups, tensors, torch.device(device))).digest()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_machine_enters_the_digest_of_a_plan_by_the_rule(device: str) -> None:
    """Not even a file that is absent."""
    other = Machine(name="gb300x72"), Machine(file="absent.json"), Machine(ranks_per_node=1)
    machines = [Machine(name="h100x8"), *other]
    assert len({digest("rule", machine, device) for machine in machines}) == 1
    assert digest("search", Machine(name="h100x8"), device) != digest("rule", Machine(name="h100x8"), device)


# Results over replicas by all-gathers

RULE = {"planner": "rule"}
SLOW_LINKS = rates(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
# Links without cost: an all-to-all to all replicas saves a collective.
FAST_LINKS = rates(ranks_per_node=1, network_gb=1e4, network_latency_us=0.0, node_latency_us=0.0)
SLOW_CALLS = rates(network_gb=1e6, node_gb=1e6, network_latency_us=1e6, node_latency_us=1e6)


@pytest.mark.parametrize(
    ("machine", "options", "is_hierarchical"),
    [
        # Fewer bytes on slow links, fewer messages on fast links, fewer calls if each call takes a second.
        (SLOW_LINKS, {}, True),
        (FAST_LINKS, {}, True),
        (SLOW_CALLS, {}, False),
        (SLOW_CALLS, RULE, True),
        (SLOW_LINKS, {"replicas": "redundant"}, False),
        (SLOW_LINKS, {"exchange": "all_gather_reduce_scatter"}, False),
    ],
    ids=["slow links", "fast links", "slow calls", "rule", "redundant", "another exchange"],
)
def test_the_planner_takes_the_faster_exchange_and_prints_the_reason(
    machine: MachineRates, options: dict[str, Any], is_hierarchical: bool
) -> None:
    matrices = [matrix(i, 8, 4, mesh_of(4, 2), Replicate(), Shard(0)) for i in range(3)]
    plan = ruled(matrices) if options == RULE else plan_of(matrices, machine, **options)
    assert ({bucket.exchange for bucket in plan.buckets} == {"hierarchical"}) == is_hierarchical
    by_rule = plan.reason.startswith("owners and rounds by a fixed rule (planner = 'rule')")
    assert by_rule == (options == RULE)
    assert by_rule or ("replicas all-gather the results" in plan.reason) == is_hierarchical
