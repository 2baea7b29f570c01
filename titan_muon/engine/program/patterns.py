"""The exchange patterns: a rank's program of a bucket, and the cost on every rank."""

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
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from ..layout.intervals import Key, Pieces, Place, Ranks
from ..layout.types import Bucket, Piece
from .phases import BucketProgram, Collective, Phase, gather_phase, parcels, splits

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


NO_TRAFFIC = LinkTraffic(0, 0, 0, 0)


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


class Pattern(ABC):
    """The exchange of a bucket's matrices. `has_owners`: whether a single owner orthogonalizes each matrix."""

    name: str
    has_owners = True

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The program of a rank of the group."""

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """The cost on each rank of the group."""

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
        owners = _owners_by_kind(bucket, pieces)
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
        owners = _owners_by_kind(bucket, pieces)
        mine, result = _counts(owners), dict[int, BucketTotals]()
        alike = _alike(bucket, mine, pieces)
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
        owners_by_kind: Mapping[int, Mapping[int, int]],
        pieces: Pieces,
        direction: int,
        ranks_to_count: Ranks,
    ) -> dict[int, _Flow]:
        """By rank, in the order of `ranks_to_count`."""
        flows = {rank: _Flow() for rank in ranks_to_count}
        owners_at: dict[Place, set[int]] = {}
        for kind, owners in owners_by_kind.items():
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


def _alike(bucket: Bucket, owned: Mapping[int, KindCounts], pieces: Pieces) -> dict[int, int]:
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


def _owners_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, dict[int, int]]:
    """The number of matrices by kind and owner."""
    by_kind: dict[int, dict[int, int]] = {}
    kinds = (pieces.kinds[matrix] for matrix in bucket.matrices)
    for (kind, owner), count in Counter(zip(kinds, bucket.owners, strict=True)).items():
        by_kind.setdefault(kind, {})[owner] = count
    return by_kind


def _counts(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """(kind, count) pairs of every rank, from counts by kind and rank."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for rank, count in owned[kind].items():
            by_rank.setdefault(rank, []).append((kind, count))
    return {rank: tuple(of_kinds) for rank, of_kinds in by_rank.items()}


class Hierarchical(AllToAll):
    """All-to-all within the owner's replica, then an all-gather of the results over replicas.

    Falls back to all_to_all if a bucket has a single replica or if its matrices' replicas differ.
    """

    # With few matrices, an owner that sends results to 128 replicas is the busiest rank. Here each replica group, the
    # ranks with equal pieces of different replicas, all-gathers the results.

    name = "hierarchical"

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        replicas = _replicas_in(bucket, pieces)
        if not replicas:
            return super().program(bucket, rank, pieces)
        place = next(ranks.index(rank) for ranks in replicas if rank in ranks)
        within = {ranks[place]: _within(bucket, ranks) for ranks in replicas}
        run = super().program(within[rank], rank, pieces)
        # In the order of the member's home buffer. This rank stores an equal piece of each matrix.
        stored = {
            member: [(parcel.matrix, parcel.piece) for parcel in self.phase(part, member, pieces, RETURN).home]
            for member, part in within.items()
        }
        replica_gather = gather_phase(stored, rank, tuple(sorted(within)), Collective.ALL_GATHER)
        return replace(run, bucket=bucket, replica_gather=replica_gather)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        replicas = _replicas_in(bucket, pieces)
        if not replicas:
            return super().totals(bucket, pieces)
        within: dict[int, BucketTotals] = {}
        for ranks in replicas:
            within |= super().totals(_within(bucket, ranks), pieces)
        result = {}
        for replica_group in zip(*replicas, strict=True):
            stored = {rank: within[rank].stored for rank in sorted(replica_group)}
            whole, flows = sum(stored.values()), _ring(stored, pieces)
            for rank, kept in stored.items():
                own = within[rank]
                result[rank] = own._replace(
                    stored=whole,
                    sent=own.sent + kept * (len(replica_group) - 1),
                    received=own.received + whole - kept,
                    buffers=(*own.buffers, whole),
                    phases=(*own.phases, flows[rank]),
                    collectives=own.collectives + bool(whole),
                )
        return result

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        replicas = _replicas_in(bucket, pieces)
        return [tuple(sorted(ranks)) for ranks in replicas if len(ranks) > 1] if replicas else (bucket.group,)

    def replica_groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        return [tuple(sorted(replica_group)) for replica_group in zip(*_replicas_in(bucket, pieces), strict=True)]


def _replicas_in(bucket: Bucket, pieces: Pieces) -> Sequence[Ranks]:
    """The ranks of each replica of a bucket's matrices; equal positions store equal pieces.

    Empty unless all matrices have several replicas, on the same sets of ranks.
    """
    kinds = {pieces.kinds[matrix] for matrix in bucket.matrices}
    replica_sets = {pieces.replicas(kind, bucket.group) for kind in kinds}
    replicas = replica_sets.pop() if len(replica_sets) == 1 else ()
    return replicas if len(replicas) > 1 and len({len(ranks) for ranks in replicas}) == 1 else ()


def _within(bucket: Bucket, ranks: Ranks) -> Bucket:
    pairs = [pair for pair in zip(bucket.matrices, bucket.owners, strict=True) if pair[1] in ranks]
    matrices, owners = tuple(matrix for matrix, _ in pairs), tuple(owner for _, owner in pairs)
    return replace(bucket, group=tuple(sorted(ranks)), matrices=matrices, owners=owners)


def _ring(stored: Mapping[int, int], pieces: Pieces) -> dict[int, LinkTraffic]:
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


class AllGather(Pattern):
    """All-gather of all pieces; every holder of a matrix orthogonalizes the matrix, without a return.

    Attributes:
        collectives: of the gather and, if the bucket has owners, of the return. Each moves all pieces.
    """

    name = "all_gather"
    has_owners = False
    collectives: tuple[Collective, ...] = (Collective.ALL_GATHER,)

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        stored = {
            peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
            for peer in bucket.group
        }
        owners = zip(bucket.matrices, bucket.owners or repeat(None), strict=False)
        mine = tuple(m for m, owner in owners if rank == owner or (owner is None and pieces.find(m, rank) is not None))
        gather, *back = (gather_phase(stored, rank, bucket.group, collective) for collective in self.collectives)
        # Never mirrored: the summed buffer must be zero except for results, but the inbox is full of pieces.
        return BucketProgram(bucket, mine, gather, back[0] if back else None, False)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        stored = dict.fromkeys(bucket.group, 0)
        held: dict[int, Counter[int]] = {}
        kinds = (pieces.kinds[matrix] for matrix in bucket.matrices)
        for (kind, owner), count in Counter(zip(kinds, bucket.owners or repeat(None), strict=False)).items():
            holders = pieces.holders(kind, bucket.group)
            for rank, elements in holders.items():
                stored[rank] += count * elements
            ranks = holders if owner is None else (owner,)
            held.setdefault(kind, Counter()).update(dict.fromkeys(ranks, count))
        whole, flows, mine, calls = sum(stored.values()), _ring(stored, pieces), _counts(held), len(self.collectives)
        result = {}
        for rank, kept in stored.items():
            sent, received = kept * (len(bucket.group) - 1), whole - kept
            if calls == 2:
                sent = received = sent + received
            buffers = (kept, whole, whole * (calls - 1))
            flow = (flows[rank],) * calls
            result[rank] = BucketTotals(mine.get(rank, ()), kept, sent, received, buffers, flow, calls)
        return result


class AllGatherReduceScatter(AllGather):
    """All-gather to the owners; the results return as a reduce-scatter of a sum with zeros."""

    # Sends as many times the bytes of an all-to-all as there are ranks. For networks with a slow all-to-all, and for
    # comparison: xtuner uses the pattern for remainder matrices.

    name = "all_gather_reduce_scatter"
    has_owners = True
    collectives = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern for pattern in (AllToAll(), AllGatherReduceScatter(), AllGather(), Hierarchical())
}
"""The values of the option `exchange`, and the automatic patterns."""
