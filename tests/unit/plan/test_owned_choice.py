"""What ways to own cost in a training step: the links of the passes by hand, memory, and which way is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.plans import plan_of
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.owned.choice import Passes, TrainingCost, cheapest, pass_seconds, rest_bytes
from titan_muon.plan.owned.ownership import OwnedItem, Ownership, assign_owners
from titan_muon.plan.owned.space import LayerSends, OwnedSpace, OwnedTensor
from titan_muon.plan.terms.machine import MACHINES, Link
from titan_muon.plan.terms.types import Mesh, Shard
from titan_muon.plan.terms.work import standard_flops
from titan_muon.tensors.matrices import stack_of

NODE, NETWORK = Link(1000.0, 0.5), Link(100.0, 2.0)
MACHINE = replace(MACHINES["h100x8"], ranks_per_node=4, node=NODE, network=NETWORK)
PASSES = Passes(count=3, gathers=2, gathered=2, reduced=4)


def space(mesh: tuple[int, int, int], sides: dict[str, int], *, whole: bool = False) -> OwnedSpace:
    """Square matrices of float32 that peers cut into rows, by name with their sides."""
    replicas, shards, peers = mesh
    tensors = {n: OwnedTensor((side, side), 4, stack_of(n, (side, side)), Shard(0)) for n, side in sides.items()}
    share = 1 if whole else peers
    items = [OwnedItem(n, n.split(".")[0], standard_flops(s, s, 5), 4 * s * s // share) for n, s in sides.items()]
    ownership = assign_owners(items, shards * peers if whole else shards)
    ranks = Mesh(mesh, tuple(range(replicas * shards * peers)))
    return OwnedSpace(ranks, tensors, frozenset(sides) if whole else frozenset(), ownership)


def test_the_links_of_a_pass_take_what_they_carry() -> None:
    """Two replicas of two shards on a node each: the broadcasts stay on it, and sums over replicas leave it."""
    found = space((2, 2, 2), {"0.a": 20, "0.b": 10, "1.a": 20})
    assert found.layers() == [LayerSends(250.0, 200.0, 0.0), LayerSends(200.0, 200.0, 0.0)]
    gather = 450 * 2 / 1000 + 2 * 0.5
    reduce = 450 * 4 / 1000 + 2 * 0.5
    # 2 (n - 1) / n of what the fullest owner has of each layer, across nodes.
    all_reduce = 400 * 4 / 100 + 2 * 2.0
    assert pass_seconds(found, PASSES, MACHINE) == pytest.approx(3 * (2 * gather + reduce + all_reduce))


def test_pieces_between_a_holder_and_its_peers_are_counted_too() -> None:
    """The busiest peer of a layer: it sends what it holds to three others, or receives what two of them hold."""
    found = space((1, 1, 4), {"0.a": 20, "0.b": 20, "0.c": 4}, whole=True)
    assert found.layers() == [LayerSends(204.0, 204.0, 300.0)]
    one_way = 300 / 1000 + 0.5
    pieces = pass_seconds(found, Passes(count=1, gathers=1, gathered=1, reduced=1), MACHINE)
    assert pieces == pytest.approx(2 * one_way), "one shard broadcasts to nobody"
    receiving = replace(found, ownership=Ownership(4, found.ownership.items, ((0,), (0,), (1,))))
    assert receiving.layers()[0].of_holder == 600.0
    spread = replace(found, ownership=Ownership(4, found.ownership.items, ((0,), (1,), (2,))))
    assert spread.layers()[0].of_holder == 300.0


def test_groups_across_nodes_have_as_many_ways_out_as_ranks_on_each() -> None:
    """Of eight shards four are on each of two nodes; of two peers apart each has its own link alone."""
    one = Passes(count=1, gathers=1, gathered=1, reduced=0)
    shards = space((1, 8, 1), {"0.a": 20})
    assert pass_seconds(shards, one, MACHINE) == pytest.approx(400 / 400 + 2.0 + 2.0)
    wide = replace(MACHINE, network=Link(900.0, 2.0))
    assert pass_seconds(shards, one, wide) == pytest.approx(400 / 1000 + 2.0 + 2.0), "a ring is on the node too"
    apart = replace(MACHINE, ranks_per_node=1)
    peers = space((1, 1, 2), {"0.a": 20}, whole=True)
    assert pass_seconds(peers, one, apart) == pytest.approx(200 / 100 + 2.0 + 2.0)


@pytest.mark.parametrize("whole", [False, True])
def test_memory_at_rest_is_that_of_the_fullest_rank(whole: bool) -> None:
    found = space((2, 2, 2), {f"{i}.a": 8 for i in range(6)}, whole=whole)
    held = dict(found.held_bytes())
    assert sorted(held) == list(range(8))
    assert sum(held.values()) == 2 * 6 * 4 * 64
    # Six matrices: two of four ranks hold two of them, or four ranks each half of three.
    fullest = 2 * 4 * 64 if whole else 3 * 4 * 32
    assert rest_bytes([found], states=2.0) == 3 * fullest
    assert rest_bytes([found, found], states=0.0) == 2 * fullest


def test_the_fastest_way_is_taken_unless_it_takes_memory_that_it_does_not_save_time_for() -> None:
    gib = 2**30
    one, other = TrainingCost(1.0, 1.0, 2 * gib), TrainingCost(0.5, 1.6, gib)
    assert cheapest({"one": one, "other": other}) == "one"
    assert cheapest({"one": replace(one, bytes=3 * gib), "other": other}) == "other"
    assert cheapest({"one": one, "other": replace(other, step=0.0)}) == "other"
    assert cheapest({"one": one, "same": one}) == "one"


def cost(found: OwnedSpace, passes: Passes, **machine: object) -> TrainingCost:
    """By the timeline, matrices in transit as float32."""
    on = replace(MACHINES["h100x8"], **machine)
    plan = plan_of(list(found.parameters()), replicas="redundant", wire_dtype="float32")
    return TrainingCost(timeline(plan, on).last.seconds, pass_seconds(found, passes, on), rest_bytes([found], 2.0))


def test_what_a_step_exchanges_is_weighed_against_what_every_pass_sends() -> None:
    """Peers send eight bytes of an element once a step, holders four in each pass, where links are what takes time."""
    sides = {f"{layer}.{name}": 64 for layer in range(2) for name in "abcd"}
    few = Passes(count=1, gathers=1, gathered=2, reduced=2)
    slow = {"node": Link(1e6, 0.0)}

    def taken(passes: Passes) -> str:
        ways = {w: space((1, 2, 2), sides, whole=w == "whole") for w in ("peers", "whole")}
        return cheapest({w: cost(found, passes, **slow) for w, found in ways.items()})

    peers, whole = (cost(space((1, 2, 2), sides, whole=whole), few, **slow) for whole in (False, True))
    assert whole.step < peers.step
    assert whole.passes > peers.passes
    assert taken(few) == "whole"
    assert taken(replace(few, count=4)) == "peers"


def test_one_owner_among_all_replicas_divides_the_work_and_the_sums() -> None:
    """Where the network is as fast as the node; across a slow one each replica gathers for itself."""
    sides = {f"{i}.a": 64 for i in range(4)}
    each, one = (space(mesh, sides) for mesh in ((2, 2, 1), (1, 4, 1)))
    steps = (cost(found, PASSES, flops=dict.fromkeys(("bfloat16", "float32"), 1e6)).step for found in (each, one))
    assert next(steps) == pytest.approx(2 * next(steps), rel=1e-3)
    slow = replace(MACHINE, ranks_per_node=2, network=Link(1.0, 2.0))
    long = replace(PASSES, gathers=8)
    assert pass_seconds(one, PASSES, MACHINE) < pass_seconds(each, PASSES, MACHINE)
    assert pass_seconds(one, long, slow) > pass_seconds(each, long, slow)
