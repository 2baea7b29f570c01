"""The interface of an exchange pattern, and a rank's cost of a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..terms.machine import MachineRates
from ..terms.pieces import Pieces, Ranks
from ..terms.types import Bucket
from .phases import BucketProgram

KindCounts = tuple[tuple[int, int], ...]
"""(kind, number of matrices), in ascending order."""


class LinkTraffic(NamedTuple):
    """Elements exchanged by a rank in a collective, within the node (near) and beyond (far).

    `*_peers`: ranks with a message in either direction.
    """

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int
    near_peers: int = 0
    far_peers: int = 0

    def seconds(self, element_bytes: int, machine: MachineRates) -> float:
        # Both links run concurrently, in both directions.
        near_seconds = machine.node.seconds(max(self.sent_near, self.received_near) * element_bytes, self.near_peers)
        far_seconds = machine.network.seconds(max(self.sent_far, self.received_far) * element_bytes, self.far_peers)
        return max(near_seconds, far_seconds)


class BucketTotals(NamedTuple):
    """A rank's cost of a bucket, in elements.

    Attributes:
        owned: matrices of each kind to orthogonalize.
        stored: of the rank's pieces.
        buffers: home buffer, inbox, outbox and, with an all-gather over replicas, its buffer.
        phases: traffic of the gather, the return and the all-gather over replicas.
        collectives: number of phases with traffic on any rank; all ranks skip a phase without traffic.
    """

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, ...]
    phases: tuple[LinkTraffic, ...]
    collectives: int
    pieces: int


def counts(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """(kind, count) pairs of every rank, from counts by kind and rank."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for rank, count in owned[kind].items():
            by_rank.setdefault(rank, []).append((kind, count))
    return {rank: tuple(of_kinds) for rank, of_kinds in by_rank.items()}


def ring(stored: Mapping[int, int], pieces: Pieces) -> dict[int, LinkTraffic]:
    """Traffic of each rank in an all-gather, or in the reverse direction in a reduce-scatter."""
    # A ring: within a node every rank passes on all received elements; elements from outside enter the node once,
    # spread over its network links.
    members, inside, whole = Counter[int](), Counter[int](), sum(stored.values())
    for rank, elements in stored.items():
        members[pieces.node(rank)] += 1
        inside[pieces.node(rank)] += elements
    flows = {}
    for rank, elements in stored.items():
        node = pieces.node(rank)
        inner = whole - elements if members[node] > 1 else 0
        outer = -(-(whole - inside[node]) // members[node])
        flows[rank] = LinkTraffic(inner, outer, inner, outer, members[node] - 1, len(members) - 1)
    return flows


class Pattern(ABC):
    """The exchange of a bucket's matrices.

    Attributes:
        has_owners: whether a single owner orthogonalizes each matrix.
        one_replica: whether an owner receives the pieces of its own replica only.
        spreads: whether replicas all-gather results.
    """

    name: str
    has_owners = True
    one_replica = False
    spreads = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The program of a rank of the group."""

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each gather and return, ascending."""
        return (bucket.group,)

    def replica_groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each collective over replicas, ascending."""
        return ()

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """The cost on each rank of the group."""
        # From shapes, because programs of 1,024 ranks for each candidate would take minutes.
        # tests/unit/plan/test_summary.py compares both.
