"""Books of a plan: what each bucket costs each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cost import standard_elements
from .layout import Geometries
from .types import Bucket, Matrix


class Ledger:
    """What buckets cost each rank, in matrices, FLOPs and elements of the wire."""

    def __init__(self, matrices: Sequence[Matrix], geometries: Geometries) -> None:
        self._matrices = matrices
        self._geometries = geometries
        self.ranks = sorted({rank for geometry in geometries.shared for rank in geometry.layout.mesh.ranks})
        self.matrices = dict.fromkeys(self.ranks, 0)
        self.flops = dict.fromkeys(self.ranks, 0)
        self.whole = dict.fromkeys(self.ranks, 0)
        self.iteration = dict.fromkeys(self.ranks, 0)
        self.sent = dict.fromkeys(self.ranks, 0)
        self.received = dict.fromkeys(self.ranks, 0)
        self.collectives = dict.fromkeys(self.ranks, 0)
        self.buffers: dict[int, list[tuple[int, tuple[int, int, int]]]] = {rank: [] for rank in self.ranks}

    def add_home(self, matrix: int, rank: int) -> None:
        """Count a matrix that a rank orthogonalizes where it rests."""
        self._orthogonalize(matrix, rank)

    def buffer(self, rank: int, slots: int) -> int:
        """Elements of the exchange's buffers on a rank.

        A slot has three buffers for each of a round's buckets, as large as the largest that take turns in them.
        """
        largest: dict[tuple[int, int, int], int] = {}
        seen: dict[int, int] = {}
        for number, sizes in self.buffers[rank]:
            place = seen[number] = seen.get(number, -1) + 1
            for kind, size in enumerate(sizes):
                key = (number % slots, place, kind)
                largest[key] = max(largest.get(key, 0), size)
        return sum(largest.values())

    def _pieces(self, matrix: int, members: frozenset[int]) -> Iterator[tuple[int, int]]:
        """(rank, elements) of each piece of a matrix on some ranks."""
        place = self._matrices[matrix]
        for rank, elements in self._geometries[place.parameter].elements(place.block).items():
            if rank in members:
                yield rank, elements

    def add(self, bucket: Bucket) -> None:
        """Count a bucket on all ranks of its group."""
        if bucket.exchange == "all_to_all":
            self._all_to_all(bucket)
        else:
            self._all_gather(bucket)

    def _all_to_all(self, bucket: Bucket) -> None:
        members = frozenset(bucket.group)
        home, gathered, inbox, outbox = (dict.fromkeys(bucket.group, 0) for _ in range(4))
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = self._geometries[self._matrices[matrix].parameter].replica
            self._orthogonalize(matrix, owner)
            for rank, elements in self._pieces(matrix, members):
                home[rank] += elements
                sent = replica[rank] == replica[owner]
                gathered[rank] += elements if sent else 0
                if rank != owner:
                    outbox[owner] += elements
                    self._move(owner, rank, elements)
                if rank != owner and sent:
                    inbox[owner] += elements
                    self._move(rank, owner, elements)
        for rank in bucket.group:
            mirrored = inbox[rank] == outbox[rank] and gathered[rank] == home[rank]
            self._close(rank, bucket.round, (home[rank], inbox[rank], 0 if mirrored else outbox[rank]), 2)

    def _all_gather(self, bucket: Bucket) -> None:
        members = frozenset(bucket.group)
        stored = dict.fromkeys(bucket.group, 0)
        for matrix in bucket.matrices:
            for rank, elements in self._pieces(matrix, members):
                stored[rank] += elements
                if not bucket.owners:
                    self._orthogonalize(matrix, rank)
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=False):
            self._orthogonalize(matrix, owner)
        total, others = sum(stored.values()), len(bucket.group) - 1
        for rank in bucket.group:
            self.sent[rank] += stored[rank] * others
            self.received[rank] += total - stored[rank]
            if bucket.owners:
                self.sent[rank] += total - stored[rank]
                self.received[rank] += stored[rank] * others
            self._close(
                rank, bucket.round, (stored[rank], total, total if bucket.owners else 0), 2 if bucket.owners else 1
            )

    def _orthogonalize(self, matrix: int, rank: int) -> None:
        self.matrices[rank] += 1
        place = self._matrices[matrix]
        self.flops[rank] += place.flops
        self.whole[rank] = max(self.whole[rank], place.numel)
        self.iteration[rank] = max(self.iteration[rank], standard_elements(place.rows, place.cols))

    def _move(self, source: int, target: int, elements: int) -> None:
        self.sent[source] += elements
        self.received[target] += elements

    def _close(self, rank: int, number: int, buffers: tuple[int, int, int], collectives: int) -> None:
        self.buffers[rank].append((number, buffers))
        self.collectives[rank] += collectives
