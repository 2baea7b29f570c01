"""Rounds of the search: order, swaps of equal matrices; the plan by a fixed rule, returns over replicas, two hops."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds import least_seconds
from tests.machines import rates
from tests.shared import muon_keywords
from tests.unit.plan.test_program import check_owners, check_step
from tests.unit.plan.test_summary import counted, parameters
from tests.unit.plans import examples, hopping, matrix, mesh_of, parameter_of, plan_of, plans, recut, work
from titan_muon import Muon
from titan_muon.engine.engine import plan_step
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Parameter, Plan, Replicate, Shard
from titan_muon.engine.layout.work import Elements
from titan_muon.engine.planning import MOST_ROUNDS, ROUND_BYTES, PlanRequest, Task, plan_by_rule
from titan_muon.engine.program.program import make_program
from titan_muon.engine.program.two_hops import owning_ranks
from titan_muon.engine.tensors.process_groups import check_node
from titan_muon.options import Machine, MuonOptions
from titan_muon.planner.machine import MACHINES, MachineRates
from titan_muon.planner.search import in_model_order
from titan_muon.planner.summary import summarize
from titan_muon.planner.timeline import timeline
from titan_muon.planner.walk import PlanCost
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


# Two hops: over the rail into the owner's node, then inside the node

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
