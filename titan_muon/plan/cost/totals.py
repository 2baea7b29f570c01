"""Totals of each bucket on each rank, and the size of exchange buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from ..exchange.all_gather import PATTERNS
from ..exchange.pattern import BucketTotals
from ..exchange.phases import aligned
from ..terms.pieces import Pieces
from ..terms.types import Bucket


class Totals:
    """Totals: `of_buckets` by bucket and rank. `buckets`: by rank, (round, totals) of its buckets."""

    def __init__(self, buckets: Sequence[Bucket], pieces: Pieces) -> None:
        self.of_buckets = [PATTERNS[bucket.exchange].totals(bucket, pieces) for bucket in buckets]
        self.buckets: dict[int, list[tuple[int, BucketTotals]]] = {rank: [] for rank in pieces.ranks()}
        for bucket, by_rank in zip(buckets, self.of_buckets, strict=True):
            for rank, totals in by_rank.items():
                self.buckets[rank].append((bucket.round, totals))

    def buffer_elements(self, rank: int, buffer_sets: int) -> int:
        # Buckets of a round need separate buffers, shared with buckets at equal positions of rounds with the same set.
        largest: dict[tuple[int, int], list[int]] = {}
        last, place = -1, 0
        for number, totals in self.buckets[rank]:
            place = place + 1 if number == last else 0
            last = number
            seen = largest.get((number % buffer_sets, place), [])
            largest[number % buffer_sets, place] = [
                max(pair) for pair in zip_longest(seen, totals.buffers, fillvalue=0)
            ]
        return sum(aligned(elements) for buffers in largest.values() for elements in buffers)
