"""What sums over HSDP's replicas send, by hand."""

from dataclasses import replace

import pytest

from titan_muon.plan.cost.replicas import has_replicas, replica_traffic
from titan_muon.plan.terms.machine import MACHINES, Link
from titan_muon.plan.terms.types import Layout, Mesh, Parameter, Placement, Plan, Replicate, Shard
from titan_muon.tensors.matrices import stack_of

RANKS = tuple(range(8))
MACHINE = MACHINES["h100x8"]
BYTES = 4


def plan(*parameters: tuple[int, tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]) -> Plan:
    """(rows of 10, shape of the mesh, placements, ranks that keep the momentum) of each parameter."""
    found = []
    for number, (rows, shape, placements, kept) in enumerate(parameters):
        layout = Layout((rows, 10), Mesh(shape, RANKS), placements)
        name = f"layers.{number}.w"
        found.append(Parameter(name, name, layout, stack_of(name, (rows, 10)), state_ranks=kept))
    return Plan(tuple(found), (), (), (), 1, 2, ())


HSDP = (Replicate(), Shard(0))


def test_each_rank_sends_what_another_replica_keeps() -> None:
    """Two replicas of four: 80 elements of the first and 40 of the second on each rank, kept by one replica each."""
    traffic = replica_traffic(plan((32, (2, 4), HSDP, (0, 1, 2, 3)), (16, (2, 4), HSDP, (4, 5, 6, 7))), BYTES, MACHINE)
    assert traffic is not None
    assert (traffic.replicas, traffic.all_reduce, traffic.reduce_scatter) == (2, 120 * BYTES, 80 * BYTES)


def test_uneven_rows_count_as_they_are_stored() -> None:
    """5 rows over four ranks are 2, 2, 1 and none."""
    traffic = replica_traffic(plan((5, (2, 4), HSDP, (0, 1, 2, 3))), BYTES, MACHINE)
    assert traffic is not None
    assert (traffic.all_reduce, traffic.reduce_scatter) == (20 * BYTES, 20 * BYTES)


def test_copies_of_tensor_parallelism_send_nothing_where_nobody_keeps_the_momentum() -> None:
    both = (Replicate(), Shard(0), Replicate())
    traffic = replica_traffic(plan((8, (2, 2, 2), both, (0, 2)), (8, (2, 2, 2), both, (5, 7))), BYTES, MACHINE)
    assert traffic is not None
    # Rank 4 sends its half of the first, rank 1 its half of the second, each to the other replica.
    assert traffic.reduce_scatter == 40 * BYTES
    assert traffic.all_reduce == 80 * BYTES


def test_where_each_replica_keeps_the_momentum_the_other_way_would_send_half() -> None:
    traffic = replica_traffic(plan((32, (4, 2), HSDP, ())), BYTES, MACHINE)
    assert traffic is not None
    assert traffic.all_reduce == 2 * 3 * 160 // 4 * BYTES == 2 * traffic.reduce_scatter


@pytest.mark.parametrize(("ranks_per_node", "link"), [(8, MACHINE.node), (4, MACHINE.network)])
def test_replicas_of_several_nodes_are_joined_by_the_network(ranks_per_node: int, link: Link) -> None:
    machine = replace(MACHINE, ranks_per_node=ranks_per_node)
    traffic = replica_traffic(plan((32, (2, 4), HSDP, ())), BYTES, machine)
    assert traffic is not None
    assert traffic.bandwidth == link.bandwidth


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((8,), (Shard(0),)), ((8,), (Replicate(),)), ((1, 8), HSDP), ((4, 2), (Shard(0), Replicate()))],
)
def test_other_layouts_have_no_replicas(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    assert not has_replicas(Layout((32, 10), Mesh(shape, RANKS), placements))
    assert replica_traffic(plan((32, shape, placements, ())), BYTES, MACHINE) is None
