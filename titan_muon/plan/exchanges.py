"""Exchange patterns: which collectives take a bucket's pieces to where they are orthogonalized, and what that costs."""

# Each pattern is one class with all that depends on it, so that a new one is a class here and a line in PATTERNS.
# Nothing else compares their names: what is asked elsewhere has an attribute here (has_owners, settles, one_copy).

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .legs import BucketProgram, Collective, Leg, parcels, splits
from .machine import Machine
from .pieces import Holders, Pieces, Replica
from .types import Bucket, Piece

KindCounts = tuple[tuple[int, int], ...]
"""(kind, how many matrices of it), in ascending order."""


class Flow(NamedTuple):
    """Elements that one rank exchanges in a collective, with ranks of its own node (near) and of others (far)."""

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int

    def seconds(self, element_bytes: int, machine: Machine) -> float:
        """Time that the rank's busiest link needs for it."""
        # Each way has its own wires, and so have the node and the network: all four are at work at once.
        near = max(self.sent_near, self.received_near) / machine.node.bandwidth
        far = max(self.sent_far, self.received_far) / machine.network.bandwidth
        return max(near, far) * element_bytes


class BucketTotals(NamedTuple):
    """What a bucket costs one rank: how many matrices of which kind it orthogonalizes, elements that it stores, sends
    to and receives from other ranks, elements of its home buffer, inbox and outbox, what it exchanges on each leg, and
    how many of the legs are collectives: one on which nothing travels is left out by all ranks of the bucket."""

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, int, int]
    legs: tuple[Flow, ...]
    collectives: int


class Pattern(ABC):
    """How the matrices of a bucket are exchanged.

    Attributes:
        name: what a user and `Bucket.exchange` call it.
        has_owners: whether one rank orthogonalizes each matrix, so that owners have to be chosen.
        settles: whether it is a choice among the others, made for each bucket.
        one_copy: whether an owner is sent the pieces of one copy alone, the one that it is part of.
    """

    name: str
    has_owners = True
    settles = False
    one_copy = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The bucket as one rank of its group runs it."""

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """What the bucket costs each rank of its group."""
        # Counted from shapes and not from programs: the planner wants this of every rank of several drafts, and
        # programs of 1,024 ranks would take minutes. tests/unit/test_plan_summary.py holds both against each other.


class AllToAll(Pattern):
    """Every piece goes to the owner of its matrix, and back: each element travels once each way."""

    name = "all_to_all"
    one_copy = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Replicas store the same momentum: the pieces of one copy make the matrix whole, and those of another would be
        # the same bytes again. The result has to reach all of them, or the replicas' weights would part.
        gathers, returns = _travels(_owned_by_kind(bucket, pieces), bucket, pieces)
        gathering = replace(self._leg(bucket, rank, pieces, one_copy=True), travels=gathers)
        returning = replace(self._leg(bucket, rank, pieces, one_copy=False), travels=returns)
        mine = tuple(_by_owner(bucket).get(rank, ()))
        return BucketProgram(bucket, mine, gathering, returning, gathering == returning)

    def _leg(self, bucket: Bucket, rank: int, pieces: Pieces, *, one_copy: bool) -> Leg:
        home: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        owned: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = pieces.geometry(matrix).replica
            for holder in bucket.group if owner == rank else (rank,):
                piece = pieces.find(matrix, holder)
                if piece is None or (one_copy and replica[holder] != replica[owner]):
                    continue
                if holder == rank:
                    home[owner].append((matrix, piece))
                else:
                    owned[holder].append((matrix, piece))
        return Leg(
            collective=Collective.ALL_TO_ALL,
            home=parcels(home, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(owned, bucket.group),
            home_splits=splits({**home, rank: ()}, bucket.group),
            owned_splits=splits(owned, bucket.group),
        )

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        sums = {rank: _Sums() for rank in bucket.group}
        owned = _owned_by_kind(bucket, pieces)
        for kind, owners in owned.items():
            _add_routes(sums, pieces.holders(kind, bucket.group), owners, pieces.replicas(kind), pieces)
        mine, calls = _counts(owned), sum(_travels(owned, bucket, pieces))
        return {rank: found.totals(mine.get(rank, ()), calls) for rank, found in sums.items()}


@dataclass
class _Sums:
    """Elements of an all-to-all on one rank: of its pieces, of those gathered and kept, and of what it owns; `near` are
    those to and from its own node, in the order of Flow's gather and return."""

    stored: int = 0
    gathered: int = 0
    kept: int = 0
    inbox: int = 0
    outbox: int = 0
    gather_sent: int = 0
    gather_received: int = 0
    return_sent: int = 0
    return_received: int = 0

    def totals(self, owned: KindCounts, collectives: int) -> BucketTotals:
        leaves, comes = self.gathered - self.kept, self.stored - self.kept
        there = Flow(
            self.gather_sent, leaves - self.gather_sent, self.gather_received, self.inbox - self.gather_received
        )
        back = Flow(
            self.return_sent, self.outbox - self.return_sent, self.return_received, comes - self.return_received
        )
        mirrored = self.inbox == self.outbox and self.gathered == self.stored
        buffers = (self.stored, self.inbox, 0 if mirrored else self.outbox)
        return BucketTotals(
            owned, self.stored, leaves + self.outbox, comes + self.inbox, buffers, (there, back), collectives
        )


def _owned_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, dict[int, int]]:
    """For each kind of matrices in the bucket how many of them each owner has."""
    found: dict[int, dict[int, int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        owners = found.setdefault(pieces.kinds[matrix], {})
        owners[owner] = owners.get(owner, 0) + 1
    return found


def _travels(owned: Mapping[int, Mapping[int, int]], bucket: Bucket, pieces: Pieces) -> tuple[bool, bool]:
    """Whether any owner of a bucket lacks a part of a matrix, and whether any other rank stores a part; `owned` is by
    kind."""
    # As copies have equal momentum, the owner of a matrix that is whole on each rank needs nothing of the others. And
    # where each slice of a matrix is all that its owner stores of it, nothing goes either way.
    gathers = returns = False
    for kind, owners in owned.items():
        holders, numel = pieces.holders(kind, bucket.group), pieces.matrices[pieces.examples[kind]].numel
        stored = {holders.on_rank.get(owner, 0) for owner in owners}
        gathers = gathers or min(stored) < numel
        returns = returns or min(stored) < holders.total
        if gathers and returns:
            break
    return gathers, returns


def _counts(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """What each owner has, by kind."""
    found: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for owner, count in owned[kind].items():
            found.setdefault(owner, []).append((kind, count))
    return {owner: tuple(counts) for owner, counts in found.items()}


def _add_routes(
    sums: Mapping[int, _Sums],
    holders: Holders,
    owned: Mapping[int, int],
    replicas: Mapping[int, Replica],
    nodes: Pieces,
) -> None:
    """Add the routes of all matrices of one kind, which `owned` counts by owner."""
    # Summed by node and replica first: that takes the holders plus the owners, and not one times the other.
    matrices, on_node, of_replica = sum(owned.values()), Counter[int](), Counter[Replica]()
    of_part = Counter[tuple[Replica, int]]()
    for owner, count in owned.items():
        replica, node = replicas[owner], nodes.node(owner)
        mine, found = holders.on_rank.get(owner, 0), sums[owner]
        found.inbox += count * (holders.of_replica[replica] - mine)
        found.outbox += count * (holders.total - mine)
        found.gather_received += count * (holders.of_part[replica, node] - mine)
        found.return_sent += count * (holders.on_node[node] - mine)
        on_node[node] += count
        of_replica[replica] += count
        of_part[replica, node] += count
    for rank, elements, node, replica in holders.found:
        mine, found = owned.get(rank, 0), sums[rank]
        found.stored += elements * matrices
        found.gathered += elements * of_replica[replica]
        found.kept += elements * mine
        found.gather_sent += elements * (of_part[replica, node] - mine)
        found.return_received += elements * (on_node[node] - mine)


class AllGather(Pattern):
    """Every rank gathers all pieces and orthogonalizes each matrix that it stores a piece of; nothing returns."""

    name = "all_gather"
    has_owners = False

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        leg = self._leg(bucket, rank, pieces)
        return BucketProgram(bucket, tuple(parcel.matrix for parcel in leg.home), leg, None, False)

    def _leg(self, bucket: Bucket, rank: int, pieces: Pieces) -> Leg:
        stored = {
            peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
            for peer in bucket.group
        }
        home, owned = parcels(stored, [rank]), parcels(stored, bucket.group)
        return Leg(Collective.ALL_GATHER, home, owned, (), splits(stored, bucket.group))

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        others = len(bucket.group) - 1
        stored = dict.fromkeys(bucket.group, 0)
        held: dict[int, dict[int, int]] = {}
        for kind, count in sorted(Counter(pieces.kinds[matrix] for matrix in bucket.matrices).items()):
            holders = pieces.holders(kind, bucket.group)
            held[kind] = dict.fromkeys(holders.on_rank, count)
            for rank, elements in holders.on_rank.items():
                stored[rank] += count * elements
        whole, flows, mine = sum(stored.values()), _ring(stored, pieces), _counts(held)
        return {
            rank: BucketTotals(
                mine.get(rank, ()), kept, kept * others, whole - kept, (kept, whole, 0), (flows[rank],), 1
            )
            for rank, kept in stored.items()
        }


def _ring(stored: Mapping[int, int], pieces: Pieces) -> dict[int, Flow]:
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
        flows[rank] = Flow(near, far, near, far)
    return flows


class AllGatherReduceScatter(AllGather):
    """As an all-gather, but owners alone orthogonalize; a sum with zeros from all others brings the results back."""

    # It sends as many times what an all-to-all sends as there are ranks, so by these numbers it never wins. It is there
    # for networks whose all-to-all is poor, and to compare with: xtuner runs it for the matrices that are left over.

    name = "all_gather_reduce_scatter"
    has_owners = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Never mirrored: what is summed has to be zero but for the results, and the inbox is full of pieces.
        leg = self._leg(bucket, rank, pieces)
        returning = replace(leg, collective=Collective.REDUCE_SCATTER)
        return BucketProgram(bucket, tuple(_by_owner(bucket).get(rank, ())), leg, returning, False)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        mine, found = _counts(_owned_by_kind(bucket, pieces)), {}
        for rank, there in super().totals(bucket, pieces).items():
            both, (home, inbox, _), legs = there.sent + there.received, there.buffers, 2 * there.legs
            own = mine.get(rank, ())
            found[rank] = BucketTotals(own, there.stored, both, both, (home, inbox, inbox), legs, 2)
        return found


class Auto(AllToAll):
    """For each bucket the pattern that takes least time on the machine, by `times.settle`."""

    # Planned as an all-to-all, whose owners and groups the other patterns can take over or do without. The reverse is
    # not so: an all-gather's groups are single copies, and its buckets have no owners.

    name = "auto"
    settles = True
    one_copy = False


def _by_owner(bucket: Bucket) -> dict[int, list[int]]:
    """Matrices by their owner."""
    mine: dict[int, list[int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        mine.setdefault(owner, []).append(matrix)
    return mine


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern for pattern in (AllToAll(), AllGatherReduceScatter(), AllGather(), Auto())
}
"""All values of the option `exchange` that the planner knows."""
