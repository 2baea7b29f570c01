"""What it takes to sum Muon's gradients over HSDP's replicas: on all of them, or where their momentum is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from ..terms.layout import Geometries, Geometry
from ..terms.machine import Machine
from ..terms.types import Layout, Parameter, Plan, Replicate


@dataclass(frozen=True)
class ReplicaTraffic:
    """Bytes of gradients that the busiest rank sends to other replicas in one backward, and the link's rate.

    Attributes:
        replicas: number of replicas.
        all_reduce: bytes if every replica has the sums, as a ring sends them.
        reduce_scatter: bytes if the replica that keeps the momentum has them; as in `all_reduce` half of it, if each
            replica keeps the momentum.
        bandwidth: bytes a second of the links between replicas.
    """

    replicas: int
    all_reduce: int
    reduce_scatter: int
    bandwidth: float


def replica_traffic(plan: Plan, element_bytes: int, machine: Machine) -> ReplicaTraffic | None:
    """Of the gradients in a plan, in elements of so many bytes; None where FSDP2 has no replicas."""
    geometries = Geometries(plan.parameters)
    sent, stored, replicas, apart = Counter[int](), Counter[int](), 1, False
    for number, parameter in enumerate(plan.parameters):
        layout = parameter.layout
        if not has_replicas(layout):
            continue
        replicas = layout.mesh.shape[0]
        apart = apart or _line_is_apart(layout, machine)
        for rank, elements in _elements(geometries[number]).items():
            stored[rank] += elements
        sent.update(_sent(parameter, geometries[number]))
    if not stored:
        return None
    all_reduce = 2 * (replicas - 1) * max(stored.values()) // replicas * element_bytes
    link = machine.network if apart else machine.node
    # Where each replica keeps the momentum nothing is sent to one alone, and parts would be even.
    scattered = max(sent.values()) * element_bytes if sent else all_reduce // 2
    return ReplicaTraffic(replicas, all_reduce, scattered, link.bandwidth)


def has_replicas(layout: Layout) -> bool:
    """Whether FSDP2 shards a tensor over several replicas."""
    # The replicas are the first axis of FSDP2's mesh, and it accepts no other.
    first, *others = layout.placements
    sharded = any(not isinstance(placement, Replicate) for placement in others)
    return isinstance(first, Replicate) and sharded and layout.mesh.shape[0] > 1


def _line_is_apart(layout: Layout, machine: Machine) -> bool:
    """Whether the ranks that hold the same shard of each replica are on several nodes."""
    ranks, inner = layout.mesh.ranks, len(layout.mesh.ranks) // layout.mesh.shape[0]
    return len({rank // machine.ranks_per_node for rank in ranks[::inner]}) > 1


def _elements(geometry: Geometry) -> dict[int, int]:
    return {rank: prod(shape) for rank, shape in geometry.local_shape.items()}


def _sent(parameter: Parameter, geometry: Geometry) -> dict[int, int]:
    """Elements that each rank sends to the replica that keeps the momentum."""
    ranks = parameter.layout.mesh.ranks
    inner = len(ranks) // parameter.layout.mesh.shape[0]
    # By the place within a replica: tensor parallelism may have copies too, of which one keeps the momentum.
    keeper = {ranks.index(rank) % inner: rank for rank in parameter.state_ranks}
    return {
        rank: elements
        for position, (rank, elements) in enumerate(_elements(geometry).items())
        if keeper.get(position % inner, rank) != rank
    }
