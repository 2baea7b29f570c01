"""Results over replicas by all-gathers: traffic computed by hand, and the planner's choice."""

from dataclasses import replace

import pytest

from tests.machines import rates
from tests.unit.plans import mesh_of, parameter_of, plan_of, ranks_of
from titan_muon.engine.layout.intervals import Geometries
from titan_muon.engine.layout.types import Parameter, Plan, Replicate, Shard
from titan_muon.engine.program.program import collective_ranks, make_program
from titan_muon.planner.machine import MachineRates
from titan_muon.planner.summary import summarize

HSDP = (Replicate(), Shard(0))
SLOW_LINKS = rates(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
# Links without cost: an all-to-all to all replicas saves a collective.
FAST_LINKS = rates(ranks_per_node=1, network_gb=1e4, network_latency_us=0.0, node_latency_us=0.0)
SLOW_CALLS = rates(network_gb=1e6, node_gb=1e6, network_latency_us=1e6, node_latency_us=1e6)


def matrices(count: int, *shape: int) -> list[Parameter]:
    return [parameter_of(f"layers.{i}.w", (8, 4), mesh_of(*shape), *HSDP) for i in range(count)]


def hsdp(count: int, *shape: int, machine: MachineRates = SLOW_LINKS) -> Plan:
    return plan_of(matrices(count, *shape), wire_dtype="bfloat16", machine=machine)


def by(plan: Plan, chosen: str) -> Plan:
    return replace(plan, buckets=tuple(replace(bucket, exchange=chosen) for bucket in plan.buckets))


def test_the_owner_sends_to_the_owners_replica_and_replica_groups_spread_the_rest() -> None:
    """32 elements on 4 replicas of 2 ranks: 16 to the peer, and 16 of each replica group to 3 replicas; or 112 from the
    owner."""
    plan = hsdp(1, 4, 2)
    (owner,) = plan.buckets[0].owners
    peer = owner ^ 1
    sent = {cost.rank: cost.bytes_sent for cost in summarize(plan).ranks}
    # Gathered is the peer's half.
    assert sent == dict.fromkeys(range(8), 0) | {owner: 2 * (16 + 3 * 16), peer: 2 * (16 + 3 * 16)}
    everywhere = {cost.rank: cost.bytes_sent for cost in summarize(by(plan, "all_to_all")).ranks}
    assert everywhere == dict.fromkeys(range(8), 0) | {owner: 2 * (32 * 4 - 16), peer: 2 * 16}
    assert sum(sent.values()) == sum(everywhere.values())


def test_collectives_run_within_replicas_and_over_replica_groups() -> None:
    plan = by(hsdp(3, 2, 2), "hierarchical")
    assert collective_ranks(plan, Geometries(plan.parameters)) == ({(0, 1), (2, 3)}, {(0, 2), (1, 3)})
    for rank in ranks_of(plan):
        for run in make_program(plan, rank).buckets:
            assert run.replica_gather is not None
            assert [phase.group for phase in run.phases] == [((0, 1), (2, 3))[rank // 2]] * 2 + [
                ((0, 2), (1, 3))[rank % 2]
            ]


@pytest.mark.parametrize(
    ("machine", "exchange"), [(SLOW_LINKS, "hierarchical"), (FAST_LINKS, "hierarchical"), (SLOW_CALLS, "all_to_all")]
)
def test_the_planner_takes_the_faster_exchange_and_prints_the_reason(machine: MachineRates, exchange: str) -> None:
    """Fewer bytes on slow links, fewer messages on fast links, fewer calls if each call takes a second."""
    plan = hsdp(3, 4, 2, machine=machine)
    assert {bucket.exchange for bucket in plan.buckets} == {exchange}
    assert ("replicas all-gather the results" in plan.reason) == (exchange == "hierarchical")


@pytest.mark.parametrize("options", [{"replicas": "redundant"}, {"exchange": "all_gather_reduce_scatter"}])
def test_auto_avoids_hierarchical_for_redundant_replicas_and_explicit_exchanges(options: dict[str, str]) -> None:
    plan = plan_of(matrices(3, 4, 2), machine=SLOW_LINKS, **options)
    assert "hierarchical" not in {bucket.exchange for bucket in plan.buckets}


def test_matrices_with_different_replica_ranks_fall_back_to_all_to_all() -> None:
    """Two replicas have two ranks and four have one: they share no replica groups."""
    parameters = [parameter_of(f"{i}", (8, 4), mesh, *HSDP) for i, mesh in enumerate((mesh_of(2, 2), mesh_of(4, 1)))]
    plan = by(plan_of(parameters, machine=SLOW_CALLS), "hierarchical")
    (bucket,) = plan.buckets
    assert set(bucket.matrices) == {0, 1}, "the case this test is for"
    assert all(run.replica_gather is None for rank in ranks_of(plan) for run in make_program(plan, rank).buckets)
    assert summarize(plan).ranks == summarize(by(plan, "all_to_all")).ranks
