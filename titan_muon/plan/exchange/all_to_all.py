"""The all-to-all: every piece goes to the rank that orthogonalizes its matrix, or to several that all do, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..terms.pieces import Holders, Pieces, Replica
from ..terms.types import Bucket, Piece
from .pattern import BucketTotals, Flow, KindCounts, Pattern
from .phases import BucketProgram, Collective, Leg, parcels, splits

Peers = Mapping[int, tuple[int, ...]]
"""The ranks of each rank's tensor-parallel group, in the order of their parts."""


class AllToAll(Pattern):
    """Every piece goes to the owner of its matrix, and back: each element travels once each way."""

    name = "all_to_all"
    one_copy = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Replicas store the same momentum: the pieces of one copy make the matrix whole, and those of another would be
        # the same bytes again. The result has to reach all of them, or the replicas' weights would part.
        gathers, returns = self._travels(owned_by_kind(bucket, pieces), bucket, pieces)
        gathering = replace(self._leg(bucket, rank, pieces, gathers=True), travels=gathers)
        returning = replace(self._leg(bucket, rank, pieces, gathers=False), travels=returns)
        mine = tuple(
            matrix
            for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True)
            if rank in self._peers(matrix, pieces).get(owner, (owner,))
        )
        return BucketProgram(bucket, mine, gathering, returning, gathering == returning)

    def _peers(self, matrix: int, pieces: Pieces) -> Peers:
        """The ranks that all orthogonalize a matrix if one of them owns it; empty if the owner alone does."""
        return {}

    def _leg(self, bucket: Bucket, rank: int, pieces: Pieces, *, gathers: bool) -> Leg:
        home: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        owned: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica, peers = pieces.geometry(matrix).replica, self._peers(matrix, pieces)
            for worker in peers.get(owner, (owner,)):
                for holder in bucket.group if worker == rank else (rank,):
                    piece = pieces.find(matrix, holder)
                    meet = (
                        replica[holder] == replica[worker]
                        if gathers
                        else _place(holder, peers) == _place(worker, peers)
                    )
                    if piece is None or not meet:
                        continue
                    if holder == rank:
                        home[worker].append((matrix, piece))
                    else:
                        owned[holder].append((matrix, piece))
        return Leg(
            collective=Collective.ALL_TO_ALL,
            home=parcels(home, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(owned, bucket.group),
            home_splits=splits({**home, rank: ()}, bucket.group),
            owned_splits=splits(owned, bucket.group),
            group=bucket.group,
        )

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        sums = {rank: _Sums() for rank in bucket.group}
        owned = owned_by_kind(bucket, pieces)
        done = {kind: self._workers(kind, owners, pieces) for kind, owners in owned.items()}
        for kind, workers in done.items():
            peers = self._peers(pieces.examples[kind], pieces)
            _add_routes(sums, pieces.holders(kind, bucket.group), workers, pieces.replicas(kind), peers, pieces)
        mine, calls = counts(done), sum(self._travels(owned, bucket, pieces))
        return {rank: found.totals(mine.get(rank, ()), calls) for rank, found in sums.items()}

    def _workers(self, kind: int, owners: Mapping[int, int], pieces: Pieces) -> Mapping[int, int]:
        """How many matrices of a kind each rank orthogonalizes; `owners` counts those that it owns."""
        peers, found = self._peers(pieces.examples[kind], pieces), Counter[int]()
        for owner, count in owners.items():
            found.update(dict.fromkeys(peers.get(owner, (owner,)), count))
        return found

    def _travels(self, owned: Mapping[int, Mapping[int, int]], bucket: Bucket, pieces: Pieces) -> tuple[bool, bool]:
        """Whether any rank lacks a part of a matrix that it orthogonalizes, and whether any other rank stores what it
        returns; `owned` is by kind."""
        # As copies have equal momentum, the owner of a matrix that is whole on each rank needs nothing of the others.
        # And where each slice of a matrix is all that its owner stores of it, nothing goes either way.
        gathers = returns = False
        for kind, owners in owned.items():
            holders, example = pieces.holders(kind, bucket.group), pieces.examples[kind]
            peers, of_place = self._peers(example, pieces), Counter[int]()
            for rank, elements, *_ in holders.found:
                of_place[_place(rank, peers)] += elements
            for worker in {worker for owner in owners for worker in peers.get(owner, (owner,))}:
                stored = holders.on_rank.get(worker, 0)
                gathers = gathers or stored < pieces.matrices[example].numel
                returns = returns or stored < of_place[_place(worker, peers)]
            if gathers and returns:
                break
        return gathers, returns


class Duplicated(AllToAll):
    """As an all-to-all, but all ranks of the owner's tensor-parallel group assemble what tensor parallelism cuts, and
    each returns its own part: as many times the Newton-Schulz and the way there, and a shorter way back."""

    name = "duplicated"
    automatic = True

    def _peers(self, matrix: int, pieces: Pieces) -> Peers:
        geometry = pieces.geometry(matrix)
        return geometry.peers if pieces.matrices[matrix].index in geometry.cut_by_peers else {}


@dataclass
class _Sums:
    """Elements of an all-to-all on one rank: of its pieces, of those gathered and kept, and of what it owns; `near` are
    those to and from its own node, in the order of Flow's gather and return. `differs`: whether what is gathered goes
    to more ranks than it returns from."""

    stored: int = 0
    gathered: int = 0
    kept: int = 0
    inbox: int = 0
    outbox: int = 0
    gather_sent: int = 0
    gather_received: int = 0
    return_sent: int = 0
    return_received: int = 0
    differs: bool = False

    def totals(self, owned: KindCounts, collectives: int) -> BucketTotals:
        leaves, comes = self.gathered - self.kept, self.stored - self.kept
        there = Flow(
            self.gather_sent, leaves - self.gather_sent, self.gather_received, self.inbox - self.gather_received
        )
        back = Flow(
            self.return_sent, self.outbox - self.return_sent, self.return_received, comes - self.return_received
        )
        mirrored = not self.differs and self.inbox == self.outbox and self.gathered == self.stored
        buffers = (max(self.gathered, self.stored), self.inbox, 0 if mirrored else self.outbox)
        return BucketTotals(
            owned, self.stored, leaves + self.outbox, comes + self.inbox, buffers, (there, back), collectives
        )


def owned_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, dict[int, int]]:
    """For each kind of matrices in the bucket how many of them each owner has."""
    found: dict[int, dict[int, int]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        owners = found.setdefault(pieces.kinds[matrix], {})
        owners[owner] = owners.get(owner, 0) + 1
    return found


def _place(rank: int, peers: Peers) -> int:
    """Which part of a matrix goes back to a rank, by its place in its tensor-parallel group; 0 if all of it does."""
    return peers[rank].index(rank) if peers else 0


def counts(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """What each owner has, by kind."""
    found: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for owner, count in owned[kind].items():
            found.setdefault(owner, []).append((kind, count))
    return {owner: tuple(counts) for owner, counts in found.items()}


def _add_routes(
    sums: Mapping[int, _Sums],
    holders: Holders,
    workers: Mapping[int, int],
    replicas: Mapping[int, Replica],
    peers: Peers,
    nodes: Pieces,
) -> None:
    """Add the routes of all matrices of one kind, which `workers` counts by the rank that orthogonalizes them."""
    # Summed by node, replica and place first: that takes the holders plus the workers, and not one times the other.
    of_replica, of_part = Counter[Replica](), Counter[tuple[Replica, int]]()
    at_place, at_node = Counter[int](), Counter[tuple[int, int]]()
    stored, stored_near = Counter[int](), Counter[tuple[int, int]]()
    for rank, elements, node, _ in holders.found:
        stored[_place(rank, peers)] += elements
        stored_near[_place(rank, peers), node] += elements
    for worker, count in workers.items():
        replica, node, place = replicas[worker], nodes.node(worker), _place(worker, peers)
        mine, found = holders.on_rank.get(worker, 0), sums[worker]
        found.inbox += count * (holders.of_replica[replica] - mine)
        found.outbox += count * (stored[place] - mine)
        found.gather_received += count * (holders.of_part[replica, node] - mine)
        found.return_sent += count * (stored_near[place, node] - mine)
        found.differs = found.differs or bool(peers)
        at_place[place] += count
        at_node[place, node] += count
        of_replica[replica] += count
        of_part[replica, node] += count
    for rank, elements, node, replica in holders.found:
        mine, found, place = workers.get(rank, 0), sums[rank], _place(rank, peers)
        found.stored += elements * at_place[place]
        found.gathered += elements * of_replica[replica]
        found.kept += elements * mine
        found.gather_sent += elements * (of_part[replica, node] - mine)
        found.return_received += elements * (at_node[place, node] - mine)
        found.differs = found.differs or bool(peers)
