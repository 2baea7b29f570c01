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
from .pattern import BucketTotals, Flow, Pattern, counts
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
        return Routes((pieces.geometry(matrix).replica.__getitem__, _everywhere))

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        travels = [any(flow.owned for flow in by_rank.values()) for by_rank in self._flows(bucket, pieces)]
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
        gather, back = self._flows(bucket, pieces)
        mine = counts({kind: workers for kind, _, workers, _ in self._kinds(bucket, pieces)})
        calls = sum(any(flow.owned for flow in by_rank.values()) for by_rank in (gather, back))
        return {rank: _totals(gather[rank], back[rank], mine.get(rank, ()), calls) for rank in bucket.group}

    def _kinds(self, bucket: Bucket, pieces: Pieces) -> Iterable[tuple[int, Routes, Counter[int], int]]:
        """By kind in the bucket: the routes, the number of matrices by worker, and their number."""
        for kind, owners in owned_by_kind(bucket, pieces).items():
            routes, workers = self.routes(pieces.examples[kind], pieces), Counter[int]()
            for owner, count in owners.items():
                workers.update(dict.fromkeys(routes.of(owner), count))
            yield kind, routes, workers, owners.total()

    def _flows(self, bucket: Bucket, pieces: Pieces) -> tuple[dict[int, _Amounts], dict[int, _Amounts]]:
        flows = ({rank: _Amounts() for rank in bucket.group}, {rank: _Amounts() for rank in bucket.group})
        partners = (_Partners(), _Partners())
        for kind, routes, workers, count in self._kinds(bucket, pieces):
            holders, parts = pieces.holders(kind, bucket.group), bool(routes.workers)
            for direction, key in enumerate(routes.keys):
                sums = holders.sums(self.name, direction, key)
                _add(flows[direction], partners[direction], holders, sums, workers, key, pieces, parts=parts)
            for rank in holders.on_rank:
                flows[RETURN][rank].pieces += count
        for by_rank, known in zip(flows, partners, strict=True):
            known.count(by_rank, pieces)
        return flows


class Duplicated(AllToAll):
    """Every rank of the owner's tensor-parallel group assembles a cut matrix, and returns its part: Newton-Schulz and
    gather once per rank, but a shorter return."""

    name = "duplicated"
    automatic = True

    def routes(self, matrix: int, pieces: Pieces) -> Routes:
        """As an all-to-all, but the return is to the ranks at equal tensor-parallel coordinates."""
        geometry, routes = pieces.geometry(matrix), super().routes(matrix, pieces)
        if pieces.matrices[matrix].index not in geometry.cut_by_peers:
            return routes
        peers = geometry.peers
        return Routes((routes.keys[GATHER], lambda rank: peers[rank].index(rank)), peers)


@dataclass
class _Amounts:
    """Elements exchanged by a rank in a phase.

    Attributes:
        home: of the rank's pieces, once per worker.
        kept: of `home`, for the rank itself.
        owned: of pieces from further ranks, for the matrices orthogonalized on this rank.
        parts: whether any matrix has several workers.
        pieces: number of the rank's pieces.
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
    pieces: int = 0
    peers: int = 0
    peers_near: int = 0


class _Partners:
    def __init__(self) -> None:
        self.workers: dict[Hashable, set[int]] = {}

    def count(self, by_rank: Mapping[int, _Amounts], pieces: Pieces) -> None:
        """Count the peers of each holder. `_add` counts the peers of each worker."""
        near = {key: Counter(map(pieces.node, ranks)) for key, ranks in self.workers.items()}
        for rank, amounts in by_rank.items():
            if amounts.home and amounts.key in near:
                workers = self.workers[amounts.key]
                itself = rank in workers
                amounts.peers = max(amounts.peers, len(workers) - itself)
                amounts.peers_near = max(amounts.peers_near, near[amounts.key][pieces.node(rank)] - itself)


def _everywhere(rank: int) -> Hashable:
    return 0


def _add(
    by_rank: Mapping[int, _Amounts],
    partners: _Partners,
    holders: Holders,
    sums: KeySums,
    workers: Mapping[int, int],
    key: Key,
    pieces: Pieces,
    *,
    parts: bool,
) -> None:
    """Add the routes of all matrices of a kind in a phase; `workers`: number of matrices by worker."""
    done, done_near = Counter[Hashable](), Counter[Hashable]()
    stored, stored_near, ranks, ranks_near = sums
    for worker, count in workers.items():
        place, node, mine = key(worker), pieces.node(worker), holders.on_rank.get(worker, 0)
        done[place] += count
        done_near[place, node] += count
        direction = by_rank[worker]
        direction.owned += count * (stored[place] - mine)
        direction.owned_near += count * (stored_near[place, node] - mine)
        direction.parts = direction.parts or parts
        itself = worker in holders.on_rank
        direction.peers = max(direction.peers, ranks[place] - itself)
        direction.peers_near = max(direction.peers_near, ranks_near[place, node] - itself)
        partners.workers.setdefault(place, set()).add(worker)
    for rank, elements, node, _ in holders.holders:
        place, count, direction = key(rank), workers.get(rank, 0), by_rank[rank]
        direction.home += elements * done[place]
        direction.kept += elements * count
        direction.home_near += elements * (done_near[place, node] - count)
        direction.parts = direction.parts or parts
        direction.key = place


def _totals(gather: _Amounts, back: _Amounts, owned: tuple[tuple[int, int], ...], calls: int) -> BucketTotals:
    leaves, comes = gather.home - gather.kept, back.home - back.kept
    gathered = Flow(
        sent_near=gather.home_near,
        sent_far=leaves - gather.home_near,
        received_near=gather.owned_near,
        received_far=gather.owned - gather.owned_near,
        near_peers=gather.peers_near,
        far_peers=gather.peers - gather.peers_near,
    )
    returned = Flow(
        sent_near=back.owned_near,
        sent_far=back.owned - back.owned_near,
        received_near=back.home_near,
        received_far=comes - back.home_near,
        near_peers=back.peers_near,
        far_peers=back.peers - back.peers_near,
    )
    mirrored = not gather.parts and (gather.home, gather.owned) == (back.home, back.owned)
    buffers = (max(gather.home, back.home), gather.owned, 0 if mirrored else back.owned)
    sent, received = leaves + back.owned, comes + gather.owned
    return BucketTotals(owned, back.home, sent, received, buffers, (gathered, returned), calls, back.pieces)


def owned_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, Counter[int]]:
    """By kind in the bucket, the number of matrices by owner."""
    by_kind: dict[int, Counter[int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        by_kind.setdefault(pieces.kinds[matrix], Counter())[owner] += 1
    return by_kind
