"""Rounds of the search: order, swaps of equal matrices, hidden rounds; and the plan by a fixed rule."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shared import muon_keywords
from tests.unit.plan.test_timeline import parameters
from tests.unit.plans import examples, mesh_of, parameter_of, plan_of, plans, work
from titan_muon import Expert, Muon
from titan_muon.engine.engine import plan_step
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Mesh, Parameter, Placement, Plan, Replicate, Shard
from titan_muon.engine.layout.work import Elements
from titan_muon.engine.planning import MOST_ROUNDS, ROUND_BYTES, PlanRequest, Task, plan_by_rule
from titan_muon.options import Machine, MuonOptions
from titan_muon.planner.search import in_model_order, rounds
from titan_muon.selection import select


@examples(50)
@given(st.integers(1, 60), st.integers(1, 20))
def test_rounds_have_about_the_same_bytes(tasks: int, count: int) -> None:
    chosen_rounds = rounds([Task(i, 0, 1, 1, "l") for i in range(tasks)], count)
    assert len(chosen_rounds) == min(tasks, count)
    assert max(map(len, chosen_rounds)) - min(map(len, chosen_rounds)) <= 1


def tasks_of(plan: Plan) -> tuple[list[list[Task]], dict[tuple[int, int], int]]:
    """The plan's rounds as tasks, and the owners."""
    groups = list(dict.fromkeys(bucket.group for bucket in plan.buckets))
    dealt: list[list[Task]] = [[] for _ in range(plan.rounds)]
    owners = {}
    for bucket in plan.buckets:
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            matrix_data, group = plan.matrices[matrix], groups.index(bucket.group)
            dealt[bucket.round].append(Task(matrix, group, matrix_data.flops, matrix_data.numel, ""))
            owners[matrix, group] = owner
    return dealt, owners


def pieces_of(plan: Plan) -> Pieces:
    return Pieces(plan.matrices, Geometries(plan.parameters))


@examples(50)
@given(plans(exchanges=["all_to_all"]))
def test_model_order_follows_the_pass_and_keeps_the_cost_of_every_owner(plan: Plan) -> None:
    pieces, (dealt, owners) = pieces_of(plan), tasks_of(plan)
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
    pieces = pieces_of(plan)
    dealt = [[Task(number, 0, 1, 1, "")] for number in (3, 2, 1, 0)]
    owners = {(number, 0): number for number in range(4)}
    candidates = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    ordered, owned = in_model_order(dealt, owners, pieces, candidates)
    assert [tasks[0].matrix for tasks in ordered] == [2, 3, 0, 1]
    assert owned == {(2, 0): 3, (3, 0): 2, (0, 0): 1, (1, 0): 0}
    assert all(rank in candidates[matrix] for (matrix, _), rank in owned.items())


# The plan by a fixed rule. Its plans are among those of `plans`, and rows of the parity table


FLAT, SQUARE = mesh_of(4), mesh_of(2, 2)


def matrix(index: int, rows: int, cols: int, mesh: Mesh = FLAT, *placements: Placement) -> Parameter:
    return parameter_of(f"layers.{index}.w", (rows, cols), mesh, *(placements or (Shard(0),)))


def ruled(parameters: list[Parameter], **options: object) -> Plan:
    chosen = MuonOptions(planner="rule", **options)
    return plan_by_rule(PlanRequest(parameters, work, chosen, Elements()))


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


def test_replicas_get_results_by_all_gathers() -> None:
    plan = ruled([matrix(i, 8, 8, SQUARE, Replicate(), Shard(0)) for i in range(6)])
    assert {bucket.exchange for bucket in plan.buckets} == {"hierarchical"}
    assert plan.reason.startswith("owners and rounds by a fixed rule (planner = 'rule')")


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


STEPS = """
import sys
import torch
from titan_muon import Expert, Muon
print(sorted(name for name in sys.modules if name.startswith({outside!r})))
params = [("w", torch.nn.Parameter(torch.ones(32, 48)))]
optimizer = Muon(params, expert=Expert(planner="rule"))
params[0][1].grad = torch.randn(32, 48)
optimizer.step()
print(sorted(name for name in sys.modules if name.startswith({planner!r})))
"""
PLANNER = ("titan_muon.planner",)
OTHERS = ("features", "kernels", "forecast", "plugins", "owned", "trainer", "audit", "assignment")


def test_muon_loads_no_planner_and_a_plan_by_the_rule_needs_none() -> None:
    # A process of its own, because the harness has imported the package.
    code = STEPS.format(planner=PLANNER, outside=(*PLANNER, *(f"titan_muon.{name}" for name in OTHERS)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
    assert Expert().planner == "search"
