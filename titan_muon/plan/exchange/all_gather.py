"""The all-gather patterns, and the table of all exchange patterns."""

# A new pattern is a class and a line in PATTERNS. Files outside this folder never compare pattern names.

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
    """All-gather of all pieces; every holder of a matrix orthogonalizes the matrix, without a return."""

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
    """All-gather to the owners; the results return as a reduce-scatter of a sum with zeros."""

    # Sends as many times the bytes of an all-to-all as there are ranks. For networks with a slow all-to-all, and for
    # comparison: xtuner uses the pattern for remainder matrices.

    name = "all_gather_reduce_scatter"
    has_owners = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        # Never mirrored: the summed buffer must be zero except for results, but the inbox is full of pieces.
        phase = self._phase(bucket, rank, pieces)
        mine = tuple(m for m, owner in zip(bucket.matrices, bucket.owners, strict=True) if owner == rank)
        return BucketProgram(bucket, mine, phase, replace(phase, collective=Collective.REDUCE_SCATTER), False)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        owned, result = counts(owned_by_kind(bucket, pieces)), {}
        for rank, gather in super().totals(bucket, pieces).items():
            both, (home, inbox, _) = gather.sent + gather.received, gather.buffers
            result[rank] = gather._replace(
                owned=owned.get(rank, ()),
                sent=both,
                received=both,
                buffers=(home, inbox, inbox),
                phases=2 * gather.phases,
                collectives=2,
            )
        return result


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern
    for pattern in (AllToAll(), AllGatherReduceScatter(), AllGather(), Duplicated(), Hierarchical())
}
"""The values of the option `exchange`, and the automatic patterns."""
