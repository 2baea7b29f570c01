"""All-to-all exchange: pieces to the owner of the matrix, and results back."""

# [Note: keys]
# In each phase, gather and return, each rank has a key. Two ranks exchange a matrix only if they have the same key.
# Example: the gather key under HSDP is the replica number. The program follows the keys piece by piece. Totals add up
# elements by key, in time holders plus owners instead of holders times owners.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from ..terms.pieces import Pieces, Ranks
from ..terms.types import Bucket, Piece
from .pattern import BucketTotals, KindCounts, LinkTraffic, Pattern, counts
from .phases import BucketProgram, Collective, Phase, parcels, splits

Key = Callable[[int], Hashable]
GATHER, RETURN = 0, 1


class AllToAll(Pattern):
    """Every piece travels to the owner of its matrix, and back: each element once in each direction."""

    name = "all_to_all"
    one_replica = True

    def key(self, matrix: int, direction: int, pieces: Pieces) -> Key:
        """The key of each rank, see [Note: keys]: gather from the owner's replica, return to all replicas."""
        # The pieces of a single replica suffice, but without the result replicas would diverge.
        return pieces.geometry(matrix).replica.__getitem__ if direction == GATHER else lambda rank: 0

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        gather, back = (
            self.phase(bucket, rank, pieces, way, _travels(self._amounts(bucket, pieces, way)))
            for way in (GATHER, RETURN)
        )
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        matrices = tuple(matrix for matrix, owner in pairs if owner == rank)
        return BucketProgram(bucket, matrices, gather, back, gather == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int, travels: bool = True) -> Phase:
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
        gather, back = (self._amounts(bucket, pieces, way) for way in (GATHER, RETURN))
        calls, mine, stored = _travels(gather) + _travels(back), counts(owners), Counter[int]()
        for kind, owner_counts in owners.items():
            stored.update(dict.fromkeys(pieces.holders(kind, bucket.group).on_rank, owner_counts.total()))
        return {
            rank: _totals(gather[rank], back[rank], mine.get(rank, ()), calls, stored[rank]) for rank in bucket.group
        }

    def _amounts(self, bucket: Bucket, pieces: Pieces, direction: int) -> dict[int, _Amounts]:
        amounts = {rank: _Amounts() for rank in bucket.group}
        owners_by_key: dict[Hashable, set[int]] = {}
        for kind, owners in _owners_by_kind(bucket, pieces).items():
            key = self.key(pieces.examples[kind], direction, pieces)
            _add(amounts, pieces, kind, bucket.group, owners, self.name, direction, key)
            for owner in owners:
                owners_by_key.setdefault(key(owner), set()).add(owner)
        _count_peers(amounts, owners_by_key, pieces)
        return amounts


def _owners_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, Counter[int]]:
    """The number of matrices by kind and owner."""
    by_kind: dict[int, Counter[int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        by_kind.setdefault(pieces.kinds[matrix], Counter())[owner] += 1
    return by_kind


@dataclass
class _Amounts:
    """Elements exchanged by a rank in a phase.

    Attributes:
        home: of the rank's pieces.
        kept: of `home`, for the rank itself.
        owned: of pieces from further ranks, for the matrices orthogonalized on this rank.
        key: of the last piece; pieces of a bucket nearly always share the key.
        peers: ranks that exchange pieces with this rank. `*_near`: within the node.
    """

    home: int = 0
    kept: int = 0
    owned: int = 0
    home_near: int = 0
    owned_near: int = 0
    key: Hashable = None
    peers: int = 0
    peers_near: int = 0

    @property
    def leaves(self) -> int:
        return self.home - self.kept

    def traffic(self, *, back: bool) -> LinkTraffic:
        home, owned = (self.home_near, self.leaves - self.home_near), (self.owned_near, self.owned - self.owned_near)
        sent, received = (owned, home) if back else (home, owned)
        return LinkTraffic(*sent, *received, self.peers_near, self.peers - self.peers_near)


def _travels(amounts: Mapping[int, _Amounts]) -> bool:
    return any(amount.owned for amount in amounts.values())


def _add(
    amounts: Mapping[int, _Amounts],
    pieces: Pieces,
    kind: int,
    group: Ranks,
    owners: Mapping[int, int],
    pattern: str,
    direction: int,
    key: Key,
) -> None:
    """Add all matrices of a kind; `owners`: number of matrices by owner."""
    holders, node_of = pieces.holders(kind, group), pieces.node
    stored, stored_near, ranks, ranks_near = holders.sums(pattern, direction, key)
    done, done_near = Counter[Hashable](), Counter[Hashable]()
    for owner, count in owners.items():
        place, node, mine = key(owner), node_of(owner), holders.on_rank.get(owner, 0)
        done[place] += count
        done_near[place, node] += count
        amount, itself = amounts[owner], owner in holders.on_rank
        amount.owned += count * (stored[place] - mine)
        amount.owned_near += count * (stored_near[place, node] - mine)
        amount.peers = max(amount.peers, ranks[place] - itself)
        amount.peers_near = max(amount.peers_near, ranks_near[place, node] - itself)
    for rank, elements, node in holders.holders:
        place, count, amount = key(rank), owners.get(rank, 0), amounts[rank]
        amount.home += elements * done[place]
        amount.kept += elements * count
        amount.home_near += elements * (done_near[place, node] - count)
        amount.key = place


def _count_peers(amounts: Mapping[int, _Amounts], owners_by_key: Mapping[Hashable, set[int]], pieces: Pieces) -> None:
    """Count the peers of holders. `_add` counts the peers of owners."""
    node_counts = {key: Counter(map(pieces.node, ranks)) for key, ranks in owners_by_key.items()}
    for rank, amount in amounts.items():
        if amount.home and amount.key in node_counts:
            itself = rank in owners_by_key[amount.key]
            amount.peers = max(amount.peers, len(owners_by_key[amount.key]) - itself)
            amount.peers_near = max(amount.peers_near, node_counts[amount.key][pieces.node(rank)] - itself)


def _totals(gather: _Amounts, back: _Amounts, owned: KindCounts, calls: int, stored: int) -> BucketTotals:
    mirrored = (gather.home, gather.owned) == (back.home, back.owned)
    buffers = (max(gather.home, back.home), gather.owned, 0 if mirrored else back.owned)
    sent, received = gather.leaves + back.owned, back.leaves + gather.owned
    traffic = (gather.traffic(back=False), back.traffic(back=True))
    return BucketTotals(owned, back.home, sent, received, buffers, traffic, calls, stored)
