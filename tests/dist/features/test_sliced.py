"""Several ranks orthogonalize slices of a matrix with the result of one rank, the planned traffic, and no hang."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.accuracy import relative_error
from tests.dist.comm.test_traffic import Case, Counted, build, count
from tests.dist.harness import run_ranks
from tests.dist.small_params import SLICED
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn
from titan_muon import Muon
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.slices import teams_in
from titan_muon.plan.terms.types import Plan

# On four ranks some matrices have two owners and some four, so teams overlap; the last matrix is not sliced.
SHAPES = {"a": (96, 32), "b": (128, 32), "c": (96, 32), "d": (64, 16), "e": (64, 16), "odd": (5, 6)}
EXACT = {"ns_dtype": "float32", "wire_dtype": "float32", **SLICED}
STEPS = 3
LAYOUTS: dict[int, dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    2: {"fsdp": ((2,), (Shard(0),)), "tp": ((2,), (Shard(1),))},
    4: {
        "fsdp": ((4,), (Shard(0),)),
        "hsdp": ((2, 2), (Replicate(), Shard(0))),
        "fsdp_tp": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    },
}


@dataclass(frozen=True)
class Trained:
    """Teams of the plan on a rank, relative errors of parameters, and whether momenta are equal."""

    teams: list[tuple[int, ...]]
    errors: list[float]
    momenta: bool


full = partial(drawn, SHAPES)


def train(rank: int, world_size: int) -> dict[str, Trained]:
    return {name: train_layout(*layout) for name, layout in LAYOUTS[world_size].items()}


def train_layout(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Trained:
    mesh = init_device_mesh("cpu", shape)

    def placed(full: torch.Tensor) -> DTensor:
        return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)

    initial = full(0)
    params = {name: nn.Parameter(placed(full)) for name, full in initial.items()}
    reference = ReferenceMuon({name: full.clone() for name, full in initial.items()}, dtype=torch.float32)
    optimizer = Muon(list(params.items()), lr=0.02, **EXACT)
    for step in range(STEPS):
        grads = full(step + 1)
        for name, param in params.items():
            param.grad = placed(grads[name])
        optimizer.step()
        reference.step(grads)
    errors, momenta = [], True
    for name, param in params.items():
        change, expected = param.full_tensor() - initial[name], reference.params[name] - initial[name]
        errors.append(float(relative_error(change, expected)))
        average = optimizer.state[param]["momentum_buffer"]
        momenta = momenta and torch.equal(average.to_local(), placed(reference.average[name]).to_local())
    return Trained(teams_of(optimizer.plan), errors, momenta)


def teams_of(plan: Plan) -> list[tuple[int, ...]]:
    return [team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_equal_the_reference_in_every_layout(world_size: int) -> None:
    for layouts in run_ranks(train, world_size):
        for name, result in layouts.items():
            assert result.teams, "the case this test is for"
            assert max(result.errors) < 1e-5, name
            assert result.momenta, name


ALL = tuple(SHAPES.values())
# Each rank stores the local slice of the last matrix, so only the owners communicate.
METHODS: tuple[dict[str, Any], ...] = (
    {"shapes": ALL, "exchange": "all_to_all", "orthogonalize": "auto"},
    {"shapes": ALL, "exchange": "all_to_all", "orthogonalize": "gram", "ns_dtype": "float32"},
    {"shapes": ALL, "exchange": "all_gather_reduce_scatter", "orthogonalize": "auto"},
    {"shapes": (SHAPES["b"],), "exchange": "all_to_all", "orthogonalize": "auto"},
)


def count_methods(rank: int, world_size: int) -> list[tuple[Plan, Counted]]:
    counts = []
    for method in METHODS:
        shapes, exchange, *_ = method.values()
        options = {key: value for key, value in method.items() if key not in ("shapes", "exchange")}
        optimizer = build(Case((4,), (Shard(0),), shapes), exchange, **{**SLICED, **options})
        counts.append((optimizer.plan, count(optimizer)))
    return counts


@cache
def counted() -> list[list[tuple[Plan, Counted]]]:
    return run_ranks(count_methods, 4)


@pytest.mark.parametrize("index", range(len(METHODS)), ids=["auto", "gram", "reduce_scatter", "stored"])
def test_bytes_calls_and_flops_equal_the_plan(index: int) -> None:
    for rank, counts in enumerate(counted()):
        plan, mine = counts[index]
        cost = summarize(plan).ranks[rank]
        assert teams_of(plan), "the case this test is for"
        assert (mine.sent, mine.flops) == (cost.bytes_sent, cost.ns_flops)
        assert len(mine.matrices) == cost.matrices
        assert mine.counters == (mine.calls, mine.sent)
        if plan.buckets[0].exchange == "all_to_all":
            assert mine.calls == cost.collectives


def test_owners_of_local_slices_exchange_only_the_team_traffic() -> None:
    for counts in counted():
        plan, mine = counts[-1]
        [team] = {work.team for work in plan.works}
        assert team is not None
        assert (mine.calls, mine.sent) == (team.calls, team.sent)


def test_the_case_has_overlapping_teams() -> None:
    teams = {team for counts in counted() for plan, _ in counts for team in teams_of(plan)}
    assert len(teams) > 2
