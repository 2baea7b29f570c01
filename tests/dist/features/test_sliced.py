"""Several ranks orthogonalize slices of a matrix with the planned traffic. Bits: tests/parity."""

from functools import cache
from typing import Any

import pytest
from torch.distributed.tensor import Shard

from tests.dist.comm.test_traffic import Case, Counted, build, count
from tests.dist.harness import run_ranks
from tests.parity.layouts import BLOCKS
from tests.parity.table import SLOW_COMPUTE
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.types import Plan, teams_in


def teams_of(plan: Plan) -> list[tuple[int, ...]]:
    return [team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()]


# On four ranks some matrices have two owners and some four, so teams overlap; the last matrix is not sliced.
ALL = tuple(BLOCKS.values())
SLICED: dict[str, Any] = {"split_over": 4, "machine": SLOW_COMPUTE}
# Each rank stores the local slice of the last matrix, so only the owners communicate.
METHODS: tuple[dict[str, Any], ...] = (
    {"shapes": ALL, "exchange": "all_to_all", "orthogonalize": "auto"},
    {"shapes": ALL, "exchange": "all_to_all", "orthogonalize": "gram", "ns_dtype": "float32"},
    {"shapes": ALL, "exchange": "all_gather_reduce_scatter", "orthogonalize": "auto"},
    {"shapes": (BLOCKS["b"],), "exchange": "all_to_all", "orthogonalize": "auto"},
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
