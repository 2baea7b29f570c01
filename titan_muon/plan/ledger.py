"""Books of a plan: what each bucket costs each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cost import Work
from .layout import Geometries
from .stacks import stacks
from .types import Bucket, Matrix


class Ledger:
    """What buckets cost each rank, in matrices, FLOPs and elements of the wire."""

    def __init__(self, matrices: Sequence[Matrix], geometries: Geometries) -> None:
        self._matrices = matrices
        self._geometries = geometries
        self.ranks = sorted({rank for geometry in geometries.shared for rank in geometry.layout.mesh.ranks})
        self.matrices = dict.fromkeys(self.ranks, 0)
        self.flops = dict.fromkeys(self.ranks, 0)
        self._at_home: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        self._in_buckets: dict[int, list[list[int]]] = {rank: [] for rank in self.ranks}
        self.sent = dict.fromkeys(self.ranks, 0)
        self.received = dict.fromkeys(self.ranks, 0)
        self.collectives = dict.fromkeys(self.ranks, 0)
        self.buffers: dict[int, list[tuple[int, tuple[int, int, int]]]] = {rank: [] for rank in self.ranks}

    def add_home(self, matrix: int, rank: int) -> None:
        """Count a matrix that a rank orthogonalizes where it rests."""
        self._orthogonalize(matrix, rank)
        self._at_home[rank].append(matrix)

    def stacked(self, rank: int, works: Sequence[Work]) -> tuple[int, int]:
        """Elements of the largest stack that a rank makes whole, and most bytes that one takes to be orthogonalized."""
        elements = bytes_ = 0
        for together in (self._at_home[rank], *self._in_buckets[rank]):
            for stack in stacks(together, self._matrices, works):
                first = self._matrices[stack[0]]
                elements = max(elements, len(stack) * first.numel)
                bytes_ = max(bytes_, len(stack) * works[first.work].bytes)
        return elements, bytes_

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
        self._open(bucket.group)
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = self._geometries[self._matrices[matrix].parameter].replica
            self._own(matrix, owner)
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
        self._open(bucket.group)
        for matrix in bucket.matrices:
            for rank, elements in self._pieces(matrix, members):
                stored[rank] += elements
                if not bucket.owners:
                    self._own(matrix, rank)
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=False):
            self._own(matrix, owner)
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

    def _open(self, group: Sequence[int]) -> None:
        """Begin a bucket: what a rank owns in it may be stacked."""
        for rank in group:
            self._in_buckets[rank].append([])

    def _own(self, matrix: int, rank: int) -> None:
        self._orthogonalize(matrix, rank)
        self._in_buckets[rank][-1].append(matrix)

    def _orthogonalize(self, matrix: int, rank: int) -> None:
        self.matrices[rank] += 1
        self.flops[rank] += self._matrices[matrix].flops

    def _move(self, source: int, target: int, elements: int) -> None:
        self.sent[source] += elements
        self.received[target] += elements

    def _close(self, rank: int, number: int, buffers: tuple[int, int, int], collectives: int) -> None:
        self.buffers[rank].append((number, buffers))
        self.collectives[rank] += collectives
