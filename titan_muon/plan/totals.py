"""Totals per rank: what each rank does at home and in its buckets, and the buffers that this takes."""

from __future__ import annotations

from collections.abc import Sequence

from .exchanges import PATTERNS, BucketTotals, Pieces
from .types import Bucket


class Totals:
    """For each rank the matrices that it orthogonalizes at home, and (round, totals) of its buckets in their order."""

    def __init__(self, home: Sequence[tuple[int, ...]], buckets: Sequence[Bucket], pieces: Pieces) -> None:
        self.home: dict[int, list[int]] = {rank: [] for rank in pieces.ranks()}
        self.buckets: dict[int, list[tuple[int, BucketTotals]]] = {rank: [] for rank in self.home}
        for matrix, ranks in enumerate(home):
            for rank in ranks:
                self.home[rank].append(matrix)
        for bucket in buckets:
            for rank, totals in PATTERNS[bucket.exchange].totals(bucket, pieces).items():
                self.buckets[rank].append((bucket.round, totals))

    def buffer_elements(self, rank: int, slots: int) -> int:
        """Elements of the exchange's buffers on a rank, when `slots` rounds have buffers at a time."""
        # A round's buckets are in flight together, so each has three buffers of its own. Buckets at the same place of
        # other rounds in the slot take turns in them, and the largest of these decides.
        largest: dict[tuple[int, int, int], int] = {}
        seen: dict[int, int] = {}
        for number, totals in self.buckets[rank]:
            place = seen[number] = seen.get(number, -1) + 1
            for kind, size in enumerate(totals.buffers):
                key = (number % slots, place, kind)
                largest[key] = max(largest.get(key, 0), size)
        return sum(largest.values())
