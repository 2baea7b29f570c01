"""All-to-all exchange: pieces to the owner of the matrix, or to several workers, and back."""

# [Note: routes]
# `Routes` describe the exchange of a matrix. In each phase, gather and return, each rank has a key; a holder exchanges
# its piece with a worker, a rank that orthogonalizes the matrix, if both keys are equal. The program follows the routes
# piece by piece. Totals add up by key, in time holders plus workers instead of holders times workers.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..terms.pieces import Holders, KeySums, Pieces, Ranks
from ..terms.types import Bucket, Piece
from .pattern import BucketTotals, Flow, KindCounts, Pattern, counts
from .phases import BucketProgram, Collective, Phase, parcels, splits

Key = Callable[[int], Hashable]
GATHER, RETURN = 0, 1


class Routes(NamedTuple):
    """See [Note: routes]. `keys`: of a rank in the gather, and in the return. `workers`: by owner, if several."""

    keys: tuple[Key, Key]
    workers: Mapping[int, Ranks] = {}

    def of(self, owner: int) -> Ranks:
        return self.workers.get(owner, (owner,))


class AllToAll(Pattern):
    """Every piece travels to the owner of its matrix, and back: each element once in each direction."""

    name = "all_to_all"
    one_replica = True

    def routes(self, matrix: int, pieces: Pieces) -> Routes:
        """Gather from the owner's replica, return to all replicas."""
        # The pieces of a single replica suffice, but without the result replicas would diverge.
        return Routes((pieces.geometry(matrix).replica.__getitem__, lambda rank: 0))

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        kinds = self._kinds(bucket, pieces)
        travels = [self._direction(bucket, pieces, kinds, way).travels for way in (GATHER, RETURN)]
        gather, back = (self.phase(bucket, rank, pieces, way, travels[way]) for way in (GATHER, RETURN))
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        matrices = tuple(matrix for matrix, owner in pairs if rank in self.routes(matrix, pieces).of(owner))
        return BucketProgram(bucket, matrices, gather, back, gather == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int, travels: bool = True) -> Phase:
        home: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        owned: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            routes = self.routes(matrix, pieces)
            key = routes.keys[direction]
            for worker in routes.of(owner):
                for holder in bucket.group if worker == rank else (rank,):
                    piece = pieces.find(matrix, holder)
                    if piece is None or key(holder) != key(worker):
                        continue
                    if holder == rank:
                        home[worker].append((matrix, piece))
                    else:
                        owned[holder].append((matrix, piece))
        return Phase(
            collective=Collective.ALL_TO_ALL,
            home=parcels(home, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(owned, bucket.group),
            home_splits=splits({**home, rank: ()}, bucket.group),
            owned_splits=splits(owned, bucket.group),
            travels=travels,
            group=bucket.group,
        )

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        kinds = self._kinds(bucket, pieces)
        gather, back = (self._direction(bucket, pieces, kinds, way) for way in (GATHER, RETURN))
        mine, stored = counts({kind: workers for kind, _, workers, _ in kinds}), Counter[int]()
        for kind, _, _, count in kinds:
            stored.update(dict.fromkeys(pieces.holders(kind, bucket.group).on_rank, count))
        calls = gather.travels + back.travels
        return {
            rank: _totals(gather.by_rank[rank], back.by_rank[rank], mine.get(rank, ()), calls, stored[rank])
            for rank in bucket.group
        }

    def _kinds(self, bucket: Bucket, pieces: Pieces) -> list[_Kind]:
        by_kind: dict[int, Counter[int]] = {}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            by_kind.setdefault(pieces.kinds[matrix], Counter())[owner] += 1
        kinds = []
        for kind, owners in by_kind.items():
            routes, workers = self.routes(pieces.examples[kind], pieces), Counter[int]()
            for owner, count in owners.items():
                workers.update(dict.fromkeys(routes.of(owner), count))
            kinds.append(_Kind(kind, routes, workers, owners.total()))
        return kinds

    def _direction(self, bucket: Bucket, pieces: Pieces, kinds: Iterable[_Kind], way: int) -> _Direction:
        direction = _Direction(bucket.group, pieces)
        for kind, routes, workers, _ in kinds:
            holders, key = pieces.holders(kind, bucket.group), routes.keys[way]
            direction.add(holders, holders.sums(self.name, way, key), workers, key, parts=bool(routes.workers))
        direction.count_peers()
        return direction


class Duplicated(AllToAll):
    """Every rank of the owner's tensor-parallel group assembles a cut matrix, and returns its part: more work and
    traffic, but a shorter return."""

    name = "duplicated"
    automatic = True

    def routes(self, matrix: int, pieces: Pieces) -> Routes:
        """Routes of an all-to-all, but the return is to the ranks at equal tensor-parallel coordinates."""
        geometry, routes = pieces.geometry(matrix), super().routes(matrix, pieces)
        if pieces.matrices[matrix].index not in geometry.cut_by_peers:
            return routes
        peers = geometry.peers
        return Routes((routes.keys[GATHER], lambda rank: peers[rank].index(rank)), peers)


class _Kind(NamedTuple):
    kind: int
    routes: Routes
    workers: Counter[int]  # Number of matrices by worker.
    matrices: int


@dataclass
class _Amounts:
    """Elements exchanged by a rank in a phase.

    Attributes:
        home: of the rank's pieces, once per worker.
        kept: of `home`, for the rank itself.
        owned: of pieces from further ranks, for the matrices orthogonalized on this rank.
        parts: whether any matrix has several workers.
        key: of the last piece's route; pieces of a bucket nearly always share the key.
        peers: ranks that exchange pieces with this rank. `*_near`: within the node.
    """

    home: int = 0
    kept: int = 0
    owned: int = 0
    home_near: int = 0
    owned_near: int = 0
    parts: bool = False
    key: Hashable = None
    peers: int = 0
    peers_near: int = 0

    @property
    def leaves(self) -> int:
        return self.home - self.kept

    def flow(self, *, back: bool) -> Flow:
        home, owned = (self.home_near, self.leaves - self.home_near), (self.owned_near, self.owned - self.owned_near)
        sent, received = (owned, home) if back else (home, owned)
        return Flow(*sent, *received, self.peers_near, self.peers - self.peers_near)


class _Direction:
    def __init__(self, group: Ranks, pieces: Pieces) -> None:
        self.by_rank = {rank: _Amounts() for rank in group}
        self._pieces = pieces
        self._workers: dict[Hashable, set[int]] = {}

    @property
    def travels(self) -> bool:
        return any(amounts.owned for amounts in self.by_rank.values())

    def add(self, holders: Holders, sums: KeySums, workers: Mapping[int, int], key: Key, *, parts: bool) -> None:
        """Add the routes of all matrices of a kind; `workers`: number of matrices by worker."""
        done, done_near, node_of = Counter[Hashable](), Counter[Hashable](), self._pieces.node
        stored, stored_near, ranks, ranks_near = sums
        for worker, count in workers.items():
            place, node, mine = key(worker), node_of(worker), holders.on_rank.get(worker, 0)
            done[place] += count
            done_near[place, node] += count
            amounts, itself = self.by_rank[worker], worker in holders.on_rank
            amounts.owned += count * (stored[place] - mine)
            amounts.owned_near += count * (stored_near[place, node] - mine)
            amounts.parts = amounts.parts or parts
            amounts.peers = max(amounts.peers, ranks[place] - itself)
            amounts.peers_near = max(amounts.peers_near, ranks_near[place, node] - itself)
            self._workers.setdefault(place, set()).add(worker)
        for rank, elements, node in holders.holders:
            place, count, amounts = key(rank), workers.get(rank, 0), self.by_rank[rank]
            amounts.home += elements * done[place]
            amounts.kept += elements * count
            amounts.home_near += elements * (done_near[place, node] - count)
            amounts.parts = amounts.parts or parts
            amounts.key = place

    def count_peers(self) -> None:
        """Count the peers of holders. `add` counts the peers of workers."""
        node_counts = {key: Counter(map(self._pieces.node, ranks)) for key, ranks in self._workers.items()}
        for rank, amounts in self.by_rank.items():
            if amounts.home and amounts.key in node_counts:
                workers = self._workers[amounts.key]
                itself = rank in workers
                amounts.peers = max(amounts.peers, len(workers) - itself)
                amounts.peers_near = max(amounts.peers_near, node_counts[amounts.key][self._pieces.node(rank)] - itself)


def _totals(gather: _Amounts, back: _Amounts, owned: KindCounts, calls: int, stored: int) -> BucketTotals:
    mirrored = not gather.parts and (gather.home, gather.owned) == (back.home, back.owned)
    buffers = (max(gather.home, back.home), gather.owned, 0 if mirrored else back.owned)
    sent, received = gather.leaves + back.owned, back.leaves + gather.owned
    flows = (gather.flow(back=False), back.flow(back=True))
    return BucketTotals(owned, back.home, sent, received, buffers, flows, calls, stored)
