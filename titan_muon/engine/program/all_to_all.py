"""The all-to-all, and what every exchange pattern has: a rank's program of a bucket, and the cost on every rank."""

# [Note: keys]
# In each phase of an all-to-all, gather and return, each rank has a key. Two ranks exchange a matrix only if they have
# the same key. Example: the gather key under HSDP is the replica number. The program follows the keys piece by piece.
# Totals add up elements by key, in time holders plus owners instead of holders times owners, because programs of 1,024
# ranks for each candidate would take minutes. tests/unit/plan/test_summary.py compares both. Ranks with equal pieces
# and matrices on equal nodes have equal totals, counted on one of them: of 16,384 ranks some fifty differ.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..layout.intervals import Key, Pieces, Place, Ranks
from ..layout.types import Bucket, Piece
from .phases import BucketProgram, Collective, Phase, parcels, splits

GATHER, RETURN = 0, 1
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

    def reversed(self) -> LinkTraffic:
        """The traffic of the way back."""
        return LinkTraffic(*self[2:4], *self[:2], *self[4:])


NO_TRAFFIC = LinkTraffic(0, 0, 0, 0)


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

    def fallback(self, kinds: Iterable[int], group: Ranks, pieces: Pieces) -> str:
        """What a bucket of these kinds has so that it goes by all_to_all; empty if nothing."""
        return ""

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each gather and return, ascending."""
        return (bucket.group,)

    def replica_groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        """The ranks of each collective over replicas, ascending."""
        return ()


@dataclass(slots=True)
class _Flow:
    """Elements of a rank in a phase of an all-to-all. Pairs: exchanged with all ranks, and within the node.

    Attributes:
        home: of the rank's pieces, for other owners.
        kept: of the rank's pieces, for the rank itself.
        owned: of other ranks' pieces, for the matrices orthogonalized on this rank.
        peers: ranks that exchange pieces with this rank.
        places: of the last piece; pieces of a bucket nearly always share the key.
    """

    home: list[int] = field(default_factory=lambda: [0, 0])
    owned: list[int] = field(default_factory=lambda: [0, 0])
    peers: list[int] = field(default_factory=lambda: [0, 0])
    kept: int = 0
    places: Sequence[Place] = ()

    def traffic(self, direction: int) -> LinkTraffic:
        sides = [(near, total - near) for total, near in (self.home, self.owned)]
        sent, received = sides if direction == GATHER else reversed(sides)
        return LinkTraffic(*sent, *received, self.peers[1], self.peers[0] - self.peers[1])


class AllToAll(Pattern):
    """Every piece travels to the owner of its matrix, and back: each element once in each direction."""

    name = "all_to_all"

    def key(self, matrix: int, direction: int, pieces: Pieces) -> Key:
        """The key of each rank, see [Note: keys]: gather from the owner's replica, return to all replicas."""
        # The pieces of a single replica suffice, but without the result replicas would diverge.
        return pieces.geometry(matrix).replica.__getitem__ if direction == GATHER else lambda rank: 0

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        owners = owners_by_kind(bucket, pieces)
        travels = (_travels(self._flows(bucket, owners, pieces, way, bucket.group)) for way in (GATHER, RETURN))
        gather, back = (
            self.phase(bucket, rank, pieces, way, travels=moves)
            for way, moves in zip((GATHER, RETURN), travels, strict=True)
        )
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        matrices = tuple(matrix for matrix, owner in pairs if owner == rank)
        return BucketProgram(bucket, matrices, gather, back, gather == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int, *, travels: bool = True) -> Phase:
        to_owners: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        from_holders: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            key = self.key(matrix, direction, pieces)
            for holder in bucket.group if owner == rank else (rank,):
                piece = pieces.find(matrix, holder)
                if piece is None or key(holder) != key(owner):
                    continue
                if holder == rank:
                    to_owners[owner].append((matrix, piece))
                else:
                    from_holders[holder].append((matrix, piece))
        return Phase(
            collective=Collective.ALL_TO_ALL,
            home=parcels(to_owners, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(from_holders, bucket.group),
            home_splits=splits({**to_owners, rank: ()}, bucket.group),
            owned_splits=splits(from_holders, bucket.group),
            travels=travels,
            group=bucket.group,
        )

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        owners = owners_by_kind(bucket, pieces)
        mine, result = counts_by_rank(owners), dict[int, BucketTotals]()
        alike = alike_ranks(bucket, mine, pieces)
        examples = tuple(dict.fromkeys(alike.values()))
        flows = [self._flows(bucket, owners, pieces, way, examples) for way in (GATHER, RETURN)]
        calls = sum(map(_travels, flows))
        for rank, gather, back in zip(examples, *(flow.values() for flow in flows), strict=True):
            homes, inbox, outbox = [flow.home[0] + flow.kept for flow in (gather, back)], gather.owned[0], back.owned[0]
            mirrored = homes[0] == homes[1] and inbox == outbox
            result[rank] = BucketTotals(
                owned=mine.get(rank, ()),
                stored=homes[1],
                sent=gather.home[0] + outbox,
                received=back.home[0] + inbox,
                buffers=(max(homes), inbox, 0 if mirrored else outbox),
                phases=(gather.traffic(GATHER), back.traffic(RETURN)),
                collectives=calls,
            )
        return {rank: result[alike[rank]] for rank in bucket.group}

    def _flows(
        self,
        bucket: Bucket,
        counts: Mapping[int, Mapping[int, int]],
        pieces: Pieces,
        direction: int,
        ranks_to_count: Ranks,
    ) -> dict[int, _Flow]:
        """By rank, in the order of `ranks_to_count`."""
        flows = {rank: _Flow() for rank in ranks_to_count}
        owners_at: dict[Place, set[int]] = {}
        for kind, owners in counts.items():
            key = self.key(pieces.examples[kind], direction, pieces)
            stored = pieces.holders(kind, bucket.group)
            elements, ranks = pieces.by_key(kind, bucket.group, (self.name, direction), key)
            taken = Counter[Place]()
            for owner, count in owners.items():
                flow, mine, itself = flows.get(owner), stored.get(owner, 0), owner in stored
                for scope, place in enumerate(pieces.places(owner, key)):
                    taken[place] += count
                    owners_at.setdefault(place, set()).add(owner)
                    if flow is not None:
                        flow.owned[scope] += count * (elements[place] - mine)
                        flow.peers[scope] = max(flow.peers[scope], ranks[place] - itself)
            for rank, flow in flows.items():
                if rank not in stored:
                    continue
                size, own = stored[rank], owners.get(rank, 0)
                flow.places = everywhere, near = pieces.places(rank, key)
                flow.home[0] += size * (taken[everywhere] - own)
                flow.home[1] += size * (taken[near] - own)
                flow.kept += size * own
        for rank, flow in flows.items():
            for scope, place in enumerate(flow.places if flow.home[0] + flow.kept else ()):
                peers = owners_at.get(place, set())
                flow.peers[scope] = max(flow.peers[scope], len(peers) - (rank in peers))
        return flows


def alike_ranks(bucket: Bucket, owned: Mapping[int, KindCounts], pieces: Pieces) -> dict[int, int]:
    """For each rank of the group, the first rank with equal pieces and matrices on a node with equal ranks."""
    kinds = tuple(sorted({pieces.kinds[matrix] for matrix in bucket.matrices}))
    nodes: dict[tuple[tuple[int, KindCounts], ...], int] = {}
    first: dict[tuple[int, KindCounts, int], int] = {}
    alike = {}
    for ranks, holdings in pieces.nodes(kinds, bucket.group):
        members = [(holding, owned.get(rank, ())) for rank, holding in zip(ranks, holdings, strict=True)]
        node = nodes.setdefault(tuple(sorted(members)), len(nodes))
        for rank, member in zip(ranks, members, strict=True):
            alike[rank] = first.setdefault((*member, node), rank)
    return alike


def _travels(flows: Mapping[int, _Flow]) -> bool:
    return any(flow.owned[0] for flow in flows.values())


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
