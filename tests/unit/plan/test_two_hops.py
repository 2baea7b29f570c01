"""Two hops: over the rail into the owner's node, then inside the node."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds import least_seconds
from tests.unit.plan.test_program import check_owners, check_step
from tests.unit.plan.test_summary import counted
from tests.unit.plans import examples, hopping, mesh_of, parameter_of, plan_of, recut
from titan_muon.engine.layout.types import Parameter, Plan, Replicate, Shard
from titan_muon.engine.program.program import make_program
from titan_muon.engine.program.two_hops import owning_ranks
from titan_muon.engine.tensors.process_groups import check_node
from titan_muon.planner.machine import MACHINES
from titan_muon.planner.summary import summarize
from titan_muon.planner.timeline import timeline
from titan_muon.planner.walk import PlanCost

CAUSES = {
    "replicas": parameter_of("a.w", (8, 6), mesh_of(2, 4), Replicate(), Shard(0)),
    "ranks of a single node": parameter_of("a.w", (8, 6), mesh_of(2), Shard(0)),
    "one rank a node": parameter_of("a.w", (4, 8, 6), mesh_of(4, 2), Shard(1), Shard(0)),
    "different ranks from node to node": parameter_of("a.w", (8, 6), mesh_of(3), Shard(0)),
}
"""A parameter on nodes of two ranks that does not hop, by cause."""


def sharded(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[Parameter]:
    return [parameter_of(f"{i}.w", shape, mesh_of(ranks), Shard(len(shape) - 2)) for i, shape in enumerate(shapes)]


@st.composite
def hopping_plans(draw: st.DrawFn) -> Plan:
    """Sharded matrices and stacks on whole nodes, or with a last node that lacks ranks; random buckets and owners."""
    ranks, per_node = draw(st.sampled_from([(4, 2), (6, 2), (6, 3), (7, 3), (8, 4), (8, 3), (9, 4)]))
    shape = st.sampled_from([(9, 4), (3, 5), (16, 2), (2, 7, 3)])
    plan = plan_of(sharded(draw(st.lists(shape, min_size=1, max_size=4)), ranks))
    plan = recut(plan, random := Random(draw(st.integers(0, 10**6))))
    owning = owning_ranks(tuple(range(ranks)), per_node)
    buckets = (replace(b, owners=tuple(random.choice(owning) for _ in b.owners)) for b in plan.buckets)
    return hopping(per_node)(replace(plan, buckets=tuple(buckets)))


@examples(40)
@given(hopping_plans())
def test_matrices_hop_whole_by_the_planned_bytes_and_peers(plan: Plan) -> None:
    runs = {rank: make_program(plan, rank).buckets for rank in plan.parameters[0].layout.mesh.ranks}
    hops = {rank: [run.gathering for run in mine if run.gathering.hop is not None] for rank, mine in runs.items()}
    assert all(len(of_rank) == len(plan.buckets) for of_rank in hops.values())
    check_owners(check_step(plan))
    machine = MACHINES["h100x8"]
    cost, played = PlanCost.from_plan(plan, machine), timeline(plan, machine)
    assert played.last.seconds >= least_seconds(plan, machine, played) * (1 - 1e-9)
    for (rank, of_rank), alike, planned in zip(hops.items(), cost.class_of, summarize(plan).ranks, strict=True):
        assert planned == counted(plan, rank)
        nodes = -(-len(hops) // plan.ranks_per_node)
        for phase, share in zip(of_rank, cost.by_class[alike][1:], strict=True):
            hop = phase.hop
            assert hop is not None

            def most(peers: tuple[int, ...], *ends: tuple[int, ...], rank: int = rank) -> int:
                """Peers of an end of a hop."""
                return max(sum(s > 0 for s, peer in zip(end, peers, strict=True) if peer != rank) for end in ends)

            # The first hop counts as that of the node's slowest rank.
            rail = most(hop.rail, phase.home_splits, hop.arriving_splits)
            assert nodes - 1 >= share.totals.phases[0].far_peers >= rail
            node = most(hop.node, hop.departing_splits, phase.owned_splits)
            assert plan.ranks_per_node - 1 >= share.totals.phases[1].near_peers >= node


@pytest.mark.parametrize("cause", CAUSES)
def test_a_plan_names_what_does_not_hop(cause: str) -> None:
    machine = replace(MACHINES["h100x8"], ranks_per_node=2)
    plan = plan_of([CAUSES[cause]], machine, exchange="two_hops")
    assert {bucket.exchange for bucket in plan.buckets} == {"all_to_all"}
    assert f"matrices by all_to_all instead of two_hops: {cause}" in plan.reason
    assert plan.ranks_per_node == 0
    hops = plan_of([CAUSES[cause], *sharded([(8, 6)], 8)], machine, exchange="two_hops")
    assert "two_hops" in {bucket.exchange for bucket in hops.buckets} or cause == "replicas"


def test_two_hops_are_tried_from_256_ranks_on_and_taken_where_they_save() -> None:
    exchanges = []
    for ranks in (128, 256):
        plan = plan_of(sharded([(4096, 4096)] * 8, ranks), MACHINES["h100x8"])
        exchanges.append({bucket.exchange for bucket in plan.buckets})
    assert exchanges == [{"all_to_all"}, {"two_hops"}]
    assert "(two_hops): at least 3% less price" in plan.reason
    fast = replace(MACHINES["h100x8"], network=MACHINES["h100x8"].node)
    plan = plan_of(sharded([(4096, 64)] * 8, 256), replace(fast, network=replace(fast.node, per_peer=0.0)))
    assert {bucket.exchange for bucket in plan.buckets} == {"all_to_all"}


@pytest.mark.parametrize(
    ("rank", "local", "fits"),
    [(0, (0, 4), True), (5, (1, 4), True), (9, (1, 2), True), (5, (1, 8), False), (5, (2, 4), False)],
)
def test_a_rank_at_another_place_of_its_node_is_refused(
    rank: int, local: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten ranks on nodes of four."""
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.setenv(name, str(value))
    with mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 10):
        check_node(0, rank)
        if fits:
            check_node(4, rank)
        else:
            with pytest.raises(ValueError, match=r"number \d of 4; torchrun .* machine.ranks_per_node"):
                check_node(4, rank)


@pytest.mark.parametrize(
    # Of 80 ranks the last node has 8 of 9, and owns nothing; 1,024 ranks fill 14 racks of 72 and a part.
    ("ranks", "per_node", "nodes", "rails"),
    [(128, 8, 16, 8), (80, 9, 8, 5), (1024, 8, 128, 1), (1024, 64, 16, 1), (1024, 72, 14, 1), (1152, 72, 16, 1)],
)
def test_owners_are_on_all_whole_nodes_and_a_rank_has_the_peers_of_its_rail_and_node(
    ranks: int, per_node: int, nodes: int, rails: int
) -> None:
    machine = replace(MACHINES["h100x8"], ranks_per_node=per_node)
    plan = plan_of(sharded([(max(ranks, 4 * per_node), 64)] * 40, ranks), machine, exchange="two_hops")
    assert {bucket.exchange for bucket in plan.buckets} == {"two_hops"}
    owners = {owner for bucket in plan.buckets for owner in bucket.owners}
    assert {owner // per_node for owner in owners} <= set(range(nodes))
    assert len({owner // per_node for owner in owners}) == min(nodes, 40)
    assert len({owner % per_node for owner in owners}) >= rails
    assert plan.ranks_per_node == per_node
    for shares in PlanCost.from_plan(plan, machine).by_class:
        for over_rail, in_node, *_ in (share.totals.phases for share in shares[1:]):
            assert (over_rail.near_peers, in_node.far_peers) == (0, 0)
            assert over_rail.far_peers <= -(-ranks // per_node) - 1
            assert in_node.near_peers <= per_node - 1
