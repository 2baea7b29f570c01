"""Exchange patterns: which collectives take a bucket's pieces to where they are orthogonalized, and what that costs."""

# Each pattern is one class with all that depends on it, so that a new one is a class here and a line in PATTERNS.
# Nothing else compares their names: what is asked elsewhere has an attribute here (has_owners, gathers_everything).

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..options import Link, MuonOptions
from .layout import Geometries, Geometry
from .legs import BucketProgram, Collective, Leg, parcels, splits
from .types import Bucket, Matrix, Piece


class Pieces:
    """Which rank stores what of each matrix of a plan."""

    def __init__(self, matrices: Sequence[Matrix], geometries: Geometries) -> None:
        self.matrices = matrices
        self._geometries = geometries

    def ranks(self) -> list[int]:
        """All ranks that any parameter is placed on, ascending."""
        return sorted({rank for geometry in self._geometries.shared for rank in geometry.layout.mesh.ranks})

    def geometry(self, matrix: int) -> Geometry:
        """The geometry of a matrix's parameter."""
        return self._geometries[self.matrices[matrix].parameter]

    def find(self, matrix: int, rank: int) -> Piece | None:
        """The piece of a matrix that a rank of its mesh stores, if any."""
        return self.geometry(matrix).pieces[rank].get(self.matrices[matrix].index)

    def elements(self, matrix: int, ranks: Collection[int]) -> Iterator[tuple[int, int]]:
        """(rank, elements) of each piece of a matrix on some ranks."""
        stored = self.geometry(matrix).elements(self.matrices[matrix].index)
        return ((rank, elements) for rank, elements in stored.items() if rank in ranks)


@dataclass(frozen=True)
class BucketTotals:
    """What a bucket costs one rank: matrices that it orthogonalizes, elements that it sends to and receives from other
    ranks, elements of its home buffer, inbox and outbox, and calls."""

    matrices: tuple[int, ...]
    sent: int
    received: int
    buffers: tuple[int, int, int]
    collectives: int


@dataclass(frozen=True)
class BucketSize:
    """What decides how long a bucket takes: ranks of its group, bytes of its matrices and of all stored pieces (more if
    ranks hold copies), FLOPs of its matrices and of the owner with most."""

    ranks: int
    matrix_bytes: int
    stored_bytes: int
    flops: int
    owner_flops: int


class Pattern(ABC):
    """How the matrices of a bucket are exchanged.

    Attributes:
        name: what a user and `Bucket.exchange` call it.
        has_owners: whether one rank orthogonalizes each matrix, so that owners have to be chosen.
        gathers_everything: whether every rank receives all pieces of the bucket, not only those of its own matrices.
    """

    name: str
    has_owners = True
    gathers_everything = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The bucket as one rank of its group runs it."""

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """What the bucket costs each rank of its group."""
        # Counted from shapes and not from programs: the planner wants this of every rank of several drafts, and
        # programs of 1,024 ranks would take minutes. tests/unit/test_plan_summary.py holds both against each other.

    @abstractmethod
    def seconds(self, size: BucketSize, link: Link) -> float:
        """How long a bucket takes. Communication and computing add up: within a bucket one waits for the other."""

    def settle(self, bucket: Bucket, pieces: Pieces, options: MuonOptions) -> Bucket:
        """The bucket with the pattern that it will be run by: this one, unless this is a choice of patterns."""
        return bucket


class AllToAll(Pattern):
    """Every piece goes to the owner of its matrix, and back: each element travels once each way."""

    name = "all_to_all"

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Replicas store the same momentum: the pieces of one copy make the matrix whole, and those of another would be
        # the same bytes again. The result has to reach all of them, or the replicas' weights would part.
        gathering = self._leg(bucket, rank, pieces, one_copy=True)
        returning = self._leg(bucket, rank, pieces, one_copy=False)
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
        members = frozenset(bucket.group)
        stored, gathered, kept, inbox, outbox = (dict.fromkeys(bucket.group, 0) for _ in range(5))
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = pieces.geometry(matrix).replica
            for rank, elements in pieces.elements(matrix, members):
                copied = elements if replica[rank] == replica[owner] else 0
                stored[rank] += elements
                gathered[rank] += copied
                if rank == owner:
                    kept[rank] += elements
                else:
                    inbox[owner] += copied
                    outbox[owner] += elements
        mine, found = _by_owner(bucket), {}
        for rank in bucket.group:
            mirrored = inbox[rank] == outbox[rank] and gathered[rank] == stored[rank]
            sent, received = gathered[rank] + outbox[rank], stored[rank] + inbox[rank]
            buffers = (stored[rank], inbox[rank], 0 if mirrored else outbox[rank])
            own = tuple(mine.get(rank, ()))
            found[rank] = BucketTotals(own, sent - kept[rank], received - kept[rank], buffers, 2)
        return found

    def seconds(self, size: BucketSize, link: Link) -> float:
        # On the mean rank: its part of the matrices there and of all copies back, but for what it owns itself.
        sent = (size.matrix_bytes + size.stored_bytes) * (size.ranks - 1) / size.ranks**2
        return 2 * link.latency + link.transfer_seconds(sent) + link.compute_seconds(size.owner_flops)


class AllGather(Pattern):
    """Every rank gathers all pieces and orthogonalizes each matrix that it stores a piece of; nothing returns."""

    name = "all_gather"
    has_owners = False
    gathers_everything = True

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
        members, others = frozenset(bucket.group), len(bucket.group) - 1
        stored = dict.fromkeys(bucket.group, 0)
        mine: dict[int, list[int]] = {rank: [] for rank in bucket.group}
        for matrix in bucket.matrices:
            for rank, elements in pieces.elements(matrix, members):
                stored[rank] += elements
                mine[rank].append(matrix)
        whole = sum(stored.values())
        return {
            rank: BucketTotals(tuple(mine[rank]), kept * others, whole - kept, (kept, whole, 0), 1)
            for rank, kept in stored.items()
        }

    def seconds(self, size: BucketSize, link: Link) -> float:
        # Over replicas it is refused instead of timed: the group of a choice has the ranks of all copies in it, so that
        # owners can be any of them, and every rank would gather and unpack each piece once for every copy.
        if size.stored_bytes != size.matrix_bytes:
            return math.inf
        sent = size.stored_bytes * (size.ranks - 1) / size.ranks
        return link.latency + link.transfer_seconds(sent) + link.compute_seconds(size.flops)


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
        mine, found = _by_owner(bucket), {}
        for rank, there in super().totals(bucket, pieces).items():
            both, (home, inbox, _) = there.sent + there.received, there.buffers
            found[rank] = BucketTotals(tuple(mine.get(rank, ())), both, both, (home, inbox, inbox), 2)
        return found

    def seconds(self, size: BucketSize, link: Link) -> float:
        sent = size.stored_bytes * (size.ranks - 1) / size.ranks
        return 2 * (link.latency + link.transfer_seconds(sent)) + link.compute_seconds(size.owner_flops)


class Auto(AllToAll):
    """For each bucket the pattern that takes least time on the user's link."""

    # Planned as an all-to-all, whose owners and groups the other patterns can take over or do without. The reverse is
    # not so: an all-gather's groups are single copies, and its buckets have no owners.

    name = "auto"

    def settle(self, bucket: Bucket, pieces: Pieces, options: MuonOptions) -> Bucket:
        size = _size(bucket, pieces, options.wire_bytes)
        timed = {name: pattern.seconds(size, options.link) for name, pattern in PATTERNS.items() if name != self.name}
        fastest = min(timed, key=timed.__getitem__)
        times = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in timed.items() if value < math.inf)
        # min takes the first of equally fast ones, so that ties go to the all-to-all.
        owners = bucket.owners if PATTERNS[fastest].has_owners else ()
        return replace(bucket, exchange=fastest, owners=owners, reason=f"{fastest} is the fastest: {times}")


def _size(bucket: Bucket, pieces: Pieces, wire_bytes: int) -> BucketSize:
    flops = {owner: sum(pieces.matrices[m].flops for m in mine) for owner, mine in _by_owner(bucket).items()}
    whole = sum(pieces.matrices[m].numel for m in bucket.matrices)
    stored = sum(sum(pieces.geometry(m).elements(pieces.matrices[m].index).values()) for m in bucket.matrices)
    ranks = len(bucket.group)
    return BucketSize(ranks, wire_bytes * whole, wire_bytes * stored, sum(flops.values()), max(flops.values()))


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
