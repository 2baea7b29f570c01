"""The all-gather patterns, and the table of all exchange patterns."""

# Each pattern is one class with all that depends on it, so that a new pattern is a class and a line in PATTERNS. Other
# files do not compare the patterns' names: they read the attributes has_owners, one_copy, spreads and automatic.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..terms.pieces import Pieces
from ..terms.types import Bucket
from .all_to_all import AllToAll, Duplicated, owned_by_kind
from .hierarchical import Hierarchical
from .pattern import BucketTotals, Pattern, counts, ring
from .phases import BucketProgram, Collective, Phase, parcels, splits


class AllGather(Pattern):
    """Every rank gathers all pieces and orthogonalizes each matrix that it stores a piece of; nothing returns."""

    name = "all_gather"
    has_owners = False

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        phase = self._phase(bucket, rank, pieces)
        return BucketProgram(bucket, tuple(parcel.matrix for parcel in phase.home), phase, None, False)

    def _phase(self, bucket: Bucket, rank: int, pieces: Pieces) -> Phase:
        stored = {
            peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
            for peer in bucket.group
        }
        home, owned = parcels(stored, [rank]), parcels(stored, bucket.group)
        return Phase(Collective.ALL_GATHER, home, owned, (), splits(stored, bucket.group), group=bucket.group)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        stored, parts = dict.fromkeys(bucket.group, 0), dict.fromkeys(bucket.group, 0)
        held: dict[int, dict[int, int]] = {}
        for kind, count in Counter(pieces.kinds[matrix] for matrix in bucket.matrices).items():
            holders = pieces.holders(kind, bucket.group)
            held[kind] = dict.fromkeys(holders.on_rank, count)
            for rank, elements in holders.on_rank.items():
                stored[rank] += count * elements
                parts[rank] += count
        whole, flows, mine, others = sum(stored.values()), ring(stored, pieces), counts(held), len(bucket.group) - 1
        return {
            rank: BucketTotals(
                mine.get(rank, ()), kept, kept * others, whole - kept, (kept, whole, 0), (flows[rank],), 1, parts[rank]
            )
            for rank, kept in stored.items()
        }


class AllGatherReduceScatter(AllGather):
    """As an all-gather, but owners alone orthogonalize; a sum with zeros from all others brings the results back."""

    # It sends as many times the bytes of an all-to-all as there are ranks, so by these numbers it never wins. It is
    # there for networks whose all-to-all is poor, and to compare with: xtuner runs it for the remaining matrices.

    name = "all_gather_reduce_scatter"
    has_owners = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Never mirrored: the summed buffer has to be zero but for the results, and the inbox is full of pieces.
        phase = self._phase(bucket, rank, pieces)
        mine = tuple(m for m, owner in zip(bucket.matrices, bucket.owners, strict=True) if owner == rank)
        return BucketProgram(bucket, mine, phase, replace(phase, collective=Collective.REDUCE_SCATTER), False)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        mine, found = counts(owned_by_kind(bucket, pieces)), {}
        for rank, there in super().totals(bucket, pieces).items():
            both, (home, inbox, _), phases = there.sent + there.received, there.buffers, 2 * there.phases
            own = mine.get(rank, ())
            found[rank] = BucketTotals(own, there.stored, both, both, (home, inbox, inbox), phases, 2, there.pieces)
        return found


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern
    for pattern in (AllToAll(), AllGatherReduceScatter(), AllGather(), Duplicated(), Hierarchical())
}
"""All values of the option `exchange` that the planner knows, and the patterns that it takes by itself."""
