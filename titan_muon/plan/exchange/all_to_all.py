"""The all-to-all: every piece goes to the rank that orthogonalizes its matrix, or to several that all do, and back."""

# [Note: routes]
# A pattern describes an exchange once, by the `Routes` of a matrix. In each phase, gather and return, a rank has a key:
# a rank that stores a piece exchanges it with a rank that orthogonalizes the matrix if their keys are equal. The
# program follows these routes piece by piece. Totals add them up key by key, which takes the number of holders plus the
# number of workers, and not one times the other.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..terms.pieces import Holders, Pieces, Ranks
from ..terms.types import Bucket, Piece
from .pattern import BucketTotals, Flow, Pattern, counts
from .phases import BucketProgram, Collective, Phase, parcels, splits

Key = Callable[[int], Hashable]
GATHER, RETURN = 0, 1


class Routes(NamedTuple):
    """Which ranks exchange a matrix, [Note: routes].

    Attributes:
        keys: key of a rank in the gather, and in the return.
        workers: for an owner all ranks that orthogonalize its matrices, where these are several.
    """

    keys: tuple[Key, Key]
    workers: Mapping[int, Ranks] = {}

    def of(self, owner: int) -> Ranks:
        """The ranks that orthogonalize the matrices of an owner."""
        return self.workers.get(owner, (owner,))


class AllToAll(Pattern):
    """Every piece goes to the owner of its matrix, and back: each element travels once each way."""

    name = "all_to_all"
    one_replica = True

    def routes(self, matrix: int, pieces: Pieces) -> Routes:
        """The routes of a matrix: from the owner's own replica, and to the ranks of all replicas."""
        # Replicas store the same momentum: the pieces of one make the matrix whole, and those of another would be the
        # same bytes again. The result has to reach all of them, or the replicas' weights would part.
        return Routes((pieces.geometry(matrix).replica.__getitem__, _everywhere))

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        travels = [any(flow.owned for flow in by_rank.values()) for by_rank in self._flows(bucket, pieces)]
        there, back = (
            self.phase(bucket, rank, pieces, direction, travels[direction]) for direction in (GATHER, RETURN)
        )
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        mine = tuple(matrix for matrix, owner in pairs if rank in self.routes(matrix, pieces).of(owner))
        return BucketProgram(bucket, mine, there, back, there == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int, travels: bool = True) -> Phase:
        """One phase of the bucket, seen from one rank."""
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
        mine = counts({kind: workers for kind, _, workers in self._kinds(bucket, pieces)})
        calls = sum(any(flow.owned for flow in by_rank.values()) for by_rank in (gather, back))
        return {rank: _totals(gather[rank], back[rank], mine.get(rank, ()), calls) for rank in bucket.group}

    def _kinds(self, bucket: Bucket, pieces: Pieces) -> Iterable[tuple[int, Routes, Counter[int]]]:
        """For each kind of matrices in the bucket its routes, and how many of them each rank orthogonalizes."""
        for kind, owners in owned_by_kind(bucket, pieces).items():
            routes, workers = self.routes(pieces.examples[kind], pieces), Counter[int]()
            for owner, count in owners.items():
                workers.update(dict.fromkeys(routes.of(owner), count))
            yield kind, routes, workers

    def _flows(self, bucket: Bucket, pieces: Pieces) -> tuple[dict[int, _Amounts], dict[int, _Amounts]]:
        """What each rank exchanges in the gather, and in the return."""
        found = ({rank: _Amounts() for rank in bucket.group}, {rank: _Amounts() for rank in bucket.group})
        for kind, routes, workers in self._kinds(bucket, pieces):
            holders = pieces.holders(kind, bucket.group)
            for by_rank, key in zip(found, routes.keys, strict=True):
                _add(by_rank, holders, workers, key, pieces, parts=bool(routes.workers))
        return found


class Duplicated(AllToAll):
    """As an all-to-all, but all ranks of the owner's tensor-parallel group assemble what tensor parallelism cuts, and
    each returns its own part: as many times the Newton-Schulz and the way there, and a shorter way back."""

    name = "duplicated"
    automatic = True

    def routes(self, matrix: int, pieces: Pieces) -> Routes:
        """As in an all-to-all, but a worker returns to the ranks at its own place of their tensor-parallel groups."""
        geometry, routes = pieces.geometry(matrix), super().routes(matrix, pieces)
        if pieces.matrices[matrix].index not in geometry.cut_by_peers:
            return routes
        peers = geometry.peers
        return Routes((routes.keys[GATHER], lambda rank: peers[rank].index(rank)), peers)


@dataclass
class _Amounts:
    """Elements that one rank exchanges in one phase.

    Attributes:
        home: of the pieces that it stores, once for each worker that has them.
        kept: of these the ones that it orthogonalizes itself.
        owned: of the pieces that other ranks store, of the matrices that it orthogonalizes.
        home_near, owned_near: of these the ones that are exchanged within its node.
        parts: whether any matrix has several workers.
    """

    home: int = 0
    kept: int = 0
    owned: int = 0
    home_near: int = 0
    owned_near: int = 0
    parts: bool = False


def _everywhere(rank: int) -> Hashable:
    return 0


def _add(
    by_rank: Mapping[int, _Amounts],
    holders: Holders,
    workers: Mapping[int, int],
    key: Key,
    pieces: Pieces,
    *,
    parts: bool,
) -> None:
    """Add the routes of all matrices of one kind in one phase; `workers` counts the matrices of each worker."""
    stored, stored_near = Counter[Hashable](), Counter[Hashable]()
    done, done_near = Counter[Hashable](), Counter[Hashable]()
    for rank, elements, node, _ in holders.holders:
        place = key(rank)
        stored[place] += elements
        stored_near[place, node] += elements
    for worker, count in workers.items():
        place, node, mine = key(worker), pieces.node(worker), holders.on_rank.get(worker, 0)
        done[place] += count
        done_near[place, node] += count
        direction = by_rank[worker]
        direction.owned += count * (stored[place] - mine)
        direction.owned_near += count * (stored_near[place, node] - mine)
        direction.parts = direction.parts or parts
    for rank, elements, node, _ in holders.holders:
        place, count, direction = key(rank), workers.get(rank, 0), by_rank[rank]
        direction.home += elements * done[place]
        direction.kept += elements * count
        direction.home_near += elements * (done_near[place, node] - count)
        direction.parts = direction.parts or parts


def _totals(gather: _Amounts, back: _Amounts, owned: tuple[tuple[int, int], ...], calls: int) -> BucketTotals:
    leaves, comes = gather.home - gather.kept, back.home - back.kept
    there = Flow(gather.home_near, leaves - gather.home_near, gather.owned_near, gather.owned - gather.owned_near)
    returns = Flow(back.owned_near, back.owned - back.owned_near, back.home_near, comes - back.home_near)
    mirrored = not gather.parts and (gather.home, gather.owned) == (back.home, back.owned)
    buffers = (max(gather.home, back.home), gather.owned, 0 if mirrored else back.owned)
    return BucketTotals(owned, back.home, leaves + back.owned, comes + gather.owned, buffers, (there, returns), calls)


def owned_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, Counter[int]]:
    """For each kind of matrices in the bucket how many of them each owner has."""
    found: dict[int, Counter[int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        found.setdefault(pieces.kinds[matrix], Counter())[owner] += 1
    return found
