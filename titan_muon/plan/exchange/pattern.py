"""What an exchange pattern is, and what a bucket that is exchanged by it costs each rank."""

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
"""(kind, how many matrices of it), in ascending order."""


class Flow(NamedTuple):
    """Elements that one rank exchanges in a collective, with ranks of its own node (near) and of others (far).

    `near_peers` and `far_peers` are the ranks that it exchanges them with, one message each way.
    """

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int
    near_peers: int = 0
    far_peers: int = 0

    def seconds(self, element_bytes: int, machine: MachineRates) -> float:
        """Time that the rank's busiest link needs for it."""
        # Each way has its own wires, and so have the node and the network: all four are at work at once.
        near = machine.node.seconds(max(self.sent_near, self.received_near) * element_bytes, self.near_peers)
        far = machine.network.seconds(max(self.sent_far, self.received_far) * element_bytes, self.far_peers)
        return max(near, far)


class BucketTotals(NamedTuple):
    """One rank's cost of a bucket.

    Attributes:
        owned: how many matrices of each kind it orthogonalizes.
        stored: elements of the pieces that it stores.
        sent: elements that it sends to other ranks.
        received: elements that it receives from other ranks.
        buffers: elements of its home buffer, inbox, outbox and, if replicas share results, of the shared buffer.
        legs: what it exchanges in the gather, the return and over replicas.
        collectives: number of legs in which anything travels; all ranks leave out the others.
        pieces: number of pieces that it stores.
    """

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, ...]
    phases: tuple[Flow, ...]
    collectives: int
    pieces: int


def counts(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """How many matrices of each kind every rank has; `owned` counts them by kind and rank."""
    found: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for rank, count in owned[kind].items():
            found.setdefault(rank, []).append((kind, count))
    return {rank: tuple(of_kinds) for rank, of_kinds in found.items()}


def ring(stored: Mapping[int, int], pieces: Pieces) -> dict[int, Flow]:
    """What the links of each rank carry in an all-gather, or backwards in a reduce-scatter."""
    # Both go around rings: within a node every rank passes on what it has received, and what comes from other nodes
    # comes in once, through the network links of all ranks of the node.
    members, inside, whole = Counter[int](), Counter[int](), sum(stored.values())
    for rank, elements in stored.items():
        members[pieces.node(rank)] += 1
        inside[pieces.node(rank)] += elements
    flows = {}
    for rank, elements in stored.items():
        node = pieces.node(rank)
        near = whole - elements if members[node] > 1 else 0
        far = -(-(whole - inside[node]) // members[node])
        # A ring has a hop for each other rank of the node, and for each other node.
        flows[rank] = Flow(near, far, near, far, members[node] - 1, len(members) - 1)
    return flows


class Pattern(ABC):
    """How the matrices of a bucket are exchanged.

    Attributes:
        name: what a user and `Bucket.exchange` call it.
        has_owners: whether one rank orthogonalizes each matrix, so that owners have to be chosen.
        one_copy: whether an owner is sent the pieces of one copy alone, the one that it is part of.
        spreads: whether an owner returns results to one copy alone, and copies share them.
        automatic: whether the planner alone chooses it, and no user by its name.
    """

    name: str
    has_owners = True
    one_replica = False
    spreads = False
    automatic = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The bucket as one rank of its group runs it."""

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each gather and return of the bucket, ascending."""
        return (bucket.group,)

    def replica_groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each collective over copies, ascending."""
        return ()

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """What the bucket costs each rank of its group."""
        # Counted from shapes and not from programs: the planner wants this of every rank of several drafts, and
        # programs of 1,024 ranks would take minutes. tests/unit/plan/test_summary.py holds both against each other.
