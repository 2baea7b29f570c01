"""The all-to-all, and what every exchange pattern has: a rank's program of a bucket, and the cost on every rank."""

# Totals add up elements by place, in time holders plus owners instead of holders times owners, because programs of
# 1,024 ranks for each candidate would take minutes. tests/unit/plan/test_summary.py compares both. Ranks with equal
# pieces and matrices on equal nodes have equal totals, counted on one of them: of 16,384 ranks some fifty differ.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..layout.intervals import Amounts, Pieces, Ranks
from ..layout.types import Bucket, Piece
from .phases import BucketProgram, Collective, Phase, parcels, splits

GATHER, RETURN = 0, 1
KindCounts = tuple[tuple[int, int], ...]
"""(kind, number of matrices), in ascending order."""


class LinkTraffic(NamedTuple):
    """Elements exchanged by a rank in a collective, within the node (near) and beyond (far).

    `*_peers`: ranks with a message in either direction. `kept`: elements for the rank itself.
    """

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int
    near_peers: int = 0
    far_peers: int = 0
    kept: int = 0

    @property
    def sent(self) -> int:
        return self.sent_near + self.sent_far

    @property
    def received(self) -> int:
        return self.received_near + self.received_far

    def reversed(self) -> LinkTraffic:
        """The traffic of the way back."""
        return LinkTraffic(*self[2:4], *self[:2], *self[4:])


class BucketTotals(NamedTuple):
    """A rank's cost of a bucket, in elements.

    Attributes:
        owned: matrices of each kind to orthogonalize.
        stored: of the rank's pieces.
        buffers: home buffer, inbox, outbox; the buffer of an all-gather over replicas; what hops receive, and send on.
        phases: traffic of the gather, of the return and of the all-gather over replicas.
        collectives: number of phases with traffic on any rank; all ranks skip a phase without traffic.
        hops: phases of the gather.
    """

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, ...]
    phases: tuple[LinkTraffic, ...]
    collectives: int
    hops: int = 1


class Pattern(ABC):
    """The exchange of a bucket's matrices.

    `has_owners`: whether a single owner orthogonalizes each matrix. `knows_nodes`: whether it reads the ranks per node.
    """

    name: str
    has_owners = True
    knows_nodes = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The program of a rank of the group."""

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """The cost on each rank of the group."""

    def fallback(self, kind: int, group: Ranks, pieces: Pieces) -> str:
        """What matrices of this kind have so that they go by all_to_all; empty if nothing."""
        return ""

    def groups(self, bucket: Bucket, pieces: Pieces) -> tuple[Iterable[Ranks], Iterable[Ranks]]:
        """The ranks of each gather and return, and of each collective over replicas, ascending."""
        return (bucket.group,), ()


class Flows:
    """The elements that ranks send to owners. `kinds`: elements by holder and matrices by owner of each kind."""

    def __init__(self, kinds: Sequence[tuple[Amounts, Amounts]]) -> None:
        self._kinds = kinds
        # Kinds of a bucket nearly always have equal replicas.
        owners = {owner: 1 for _, matrices in kinds for owner in matrices.by_rank}
        self._owners = kinds[-1][1].like(owners) if kinds else Amounts({}, 0)

    @property
    def travels(self) -> bool:
        """Whether any owner lacks elements."""
        kinds = ((elements, owner) for elements, matrices in self._kinds for owner in matrices.by_rank)
        return any(elements.around(owner)[0][1] > (owner in elements.by_rank) for elements, owner in kinds)

    def of_rank(self, rank: int) -> LinkTraffic:
        sent, received, peers, kept = [0, 0], [0, 0], [0, 0], 0
        for elements, matrices in self._kinds:
            mine, own = elements.by_rank.get(rank, 0), matrices.by_rank.get(rank, 0)
            kept += mine * own
            around = zip(elements.around(rank), matrices.around(rank), strict=True) if mine or own else ()
            for scope, ((stored, holders), (taken, _)) in enumerate(around):
                sent[scope] += mine * (taken - own)
                received[scope] += own * (stored - mine)
                peers[scope] = max(peers[scope], holders - (mine > 0) if own else 0)
        for scope, (_, count) in enumerate(self._owners.around(rank) if sent[0] + kept else ()):
            peers[scope] = max(peers[scope], count - (rank in self._owners.by_rank))
        sides = [(near, everywhere - near) for everywhere, near in (sent, received, peers)]
        return LinkTraffic(*sides[0], *sides[1], *sides[2], kept)


class AllToAll(Pattern):
    """Every piece travels to the owner of its matrix, and back: each element once in each direction."""

    name = "all_to_all"

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        gather, back = (self.phase(bucket, rank, pieces, direction) for direction in (GATHER, RETURN))
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        matrices = tuple(matrix for matrix, owner in pairs if owner == rank)
        return BucketProgram(bucket, matrices, gather, back, gather == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int) -> Phase:
        to_owners: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        from_holders: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = pieces.geometry(matrix).replica
            for holder in bucket.group if owner == rank else (rank,):
                piece = pieces.find(matrix, holder)
                if piece is None or (direction == GATHER and replica[holder] != replica[owner]):
                    continue
                if holder == rank:
                    to_owners[owner].append((matrix, piece))
                else:
                    from_holders[holder].append((matrix, piece))
        return Phase(
            collective=Collective.ALL_TO_ALL,
            home=parcels(to_owners, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(from_holders, self.arrival(bucket.group, pieces)),
            home_splits=splits({**to_owners, rank: ()}, bucket.group),
            owned_splits=splits(from_holders, bucket.group),
            travels=_flows(bucket, owners_by_kind(bucket, pieces), pieces, direction).travels,
            group=bucket.group,
        )

    def arrival(self, group: Ranks, pieces: Pieces) -> Sequence[int]:
        """The order of holders in the owner's buffer."""
        return group

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        owners = owners_by_kind(bucket, pieces)
        mine, result = counts_by_rank(owners), dict[int, BucketTotals]()
        ways = [_flows(bucket, owners, pieces, direction) for direction in (GATHER, RETURN)]
        alike, calls = _alike(bucket, mine, pieces), sum(flows.travels for flows in ways)
        for rank in dict.fromkeys(alike.values()):
            gather, back = (flows.of_rank(rank) for flows in ways)
            homes, inbox, outbox = [way.sent + way.kept for way in (gather, back)], gather.received, back.received
            mirrored = homes[0] == homes[1] and inbox == outbox
            result[rank] = BucketTotals(
                owned=mine.get(rank, ()),
                stored=homes[1],
                sent=gather.sent + outbox,
                received=back.sent + inbox,
                buffers=(max(homes), inbox, 0 if mirrored else outbox),
                phases=(gather, back.reversed()),
                collectives=calls,
            )
        return {rank: result[alike[rank]] for rank in bucket.group}


def _flows(bucket: Bucket, owners: Mapping[int, Mapping[int, int]], pieces: Pieces, direction: int) -> Flows:
    # The pieces of the owner's replica suffice, but without the result other replicas would diverge.
    held = {kind: pieces.elements(kind, bucket.group, by_replica=direction == GATHER) for kind in owners}
    return Flows([(held[kind], held[kind].like(counts)) for kind, counts in owners.items()])


Members = tuple[tuple[int, KindCounts], ...]
"""What each rank of a node holds, as a number, and the matrices that it owns."""


def members_of_nodes(
    bucket: Bucket, owned: Mapping[int, KindCounts], pieces: Pieces
) -> list[tuple[list[int], Members]]:
    """The ranks of each node of a bucket."""
    kinds = tuple(sorted({pieces.kinds[matrix] for matrix in bucket.matrices}))
    return [
        (ranks, tuple([(held, owned.get(rank, ())) for rank, held in zip(ranks, holdings, strict=True)]))
        for ranks, holdings in pieces.nodes(kinds, bucket.group)
    ]


def _alike(bucket: Bucket, owned: Mapping[int, KindCounts], pieces: Pieces) -> dict[int, int]:
    """For each rank of the group, the first rank with equal pieces and matrices on a node with equal ranks."""
    nodes, first, alike = dict[Members, int](), dict[tuple[int, KindCounts, int], int](), dict[int, int]()
    for ranks, members in members_of_nodes(bucket, owned, pieces):
        node = nodes.setdefault(tuple(sorted(members)), len(nodes))
        for rank, member in zip(ranks, members, strict=True):
            alike[rank] = first.setdefault((*member, node), rank)
    return alike


def owners_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, dict[int, int]]:
    """The number of matrices by kind and owner."""
    by_kind: dict[int, dict[int, int]] = {}
    kinds = (pieces.kinds[matrix] for matrix in bucket.matrices)
    for (kind, owner), count in Counter(zip(kinds, bucket.owners, strict=True)).items():
        by_kind.setdefault(kind, {})[owner] = count
    return by_kind


def counts_by_rank(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """(kind, count) pairs of every rank, from counts by kind and rank."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for rank, count in owned[kind].items():
            by_rank.setdefault(rank, []).append((kind, count))
    return {rank: tuple(of_kinds) for rank, of_kinds in by_rank.items()}
