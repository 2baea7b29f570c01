"""The plan by a fixed rule. Its plans are among those of `tests.unit.plans.plans`, and rows of the parity table."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.shared import muon_keywords
from tests.unit.plans import mesh_of, parameter_of, work
from titan_muon import Expert, Muon
from titan_muon.engine.layout.types import Mesh, Parameter, Placement, Plan, Replicate, Shard
from titan_muon.engine.layout.work import Elements
from titan_muon.engine.planning import PlanRequest
from titan_muon.engine.rule import MOST_ROUNDS, ROUND_BYTES, plan_by_rule
from titan_muon.options import Machine, MuonOptions, OptionError
from titan_muon.selection import select

FLAT, SQUARE = mesh_of(4), mesh_of(2, 2)


def matrix(index: int, rows: int, cols: int, mesh: Mesh = FLAT, *placements: Placement) -> Parameter:
    return parameter_of(f"layers.{index}.w", (rows, cols), mesh, *(placements or (Shard(0),)))


def ruled(parameters: list[Parameter], **options: object) -> Plan:
    chosen = MuonOptions(planner="rule", **options)  # type: ignore[arg-type]
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


def test_what_the_rule_cannot_do_is_refused_with_a_remedy() -> None:
    parameters = [matrix(i, 64, 64) for i in range(4)]
    with pytest.raises(
        OptionError, match=r"^buffer_gib = .* too small for planner = 'rule', .* set planner = 'search'"
    ):
        ruled(parameters, buffer_gib=1 / 2**30)


def digest(planner: str, machine: Machine, device: str) -> str:
    params = [(f"w{i}", torch.nn.Parameter(torch.empty(4096, 64 << i, device="meta"))) for i in range(4)]
    muon = Muon(params, **muon_keywords(planner=planner, machine=machine, orthogonalize="auto"))
    from titan_muon.engine.engine import plan_step

    groups, tensors = [muon.param_groups[0]] * len(params), [tensor for _, tensor in params]
    return plan_step(params, groups, select(muon.options, groups, tensors, torch.device(device))).digest()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_machine_enters_the_digest_of_a_plan_by_the_rule(device: str) -> None:
    """Not even a file that is absent."""
    machines = [
        Machine(name="h100x8"),
        Machine(name="gb300x72"),
        Machine(file="absent.json"),
        Machine(ranks_per_node=1),
    ]
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
OTHERS = tuple(
    f"titan_muon.{name}"
    for name in ("features", "kernels", "forecast", "plugins", "owned", "trainer", "audit", "assignment")
)


def test_muon_loads_no_planner_and_a_plan_by_the_rule_needs_none() -> None:
    # A process of its own, because the harness has imported the package.
    code = STEPS.format(planner=PLANNER, outside=(*PLANNER, *OTHERS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
    assert Expert().planner == "search"
