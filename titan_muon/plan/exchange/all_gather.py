"""The all-gather patterns, and the table of all exchange patterns."""

# A new pattern is a class and a line in PATTERNS.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import repeat

from ..terms.pieces import Pieces
from ..terms.types import Bucket
from .all_to_all import AllToAll
from .hierarchical import Hierarchical
from .pattern import BucketTotals, Pattern, counts, ring
from .phases import BucketProgram, Collective, gather_phase


class AllGather(Pattern):
    """All-gather of all pieces; every holder of a matrix orthogonalizes the matrix, without a return.

    Attributes:
        collectives: of the gather and, if the bucket has owners, of the return. Each moves all pieces.
    """

    name = "all_gather"
    has_owners = False
    collectives: tuple[Collective, ...] = (Collective.ALL_GATHER,)

    def _orthogonalizing_ranks(self, bucket: Bucket, pieces: Pieces, kind: int, owner: int | None) -> Collection[int]:
        return pieces.holders(kind, bucket.group).on_rank if owner is None else (owner,)

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        stored = {
            peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
            for peer in bucket.group
        }
        owners = zip(bucket.matrices, bucket.owners or repeat(None), strict=False)
        mine = tuple(
            m for m, owner in owners if rank in self._orthogonalizing_ranks(bucket, pieces, pieces.kinds[m], owner)
        )
        gather, *back = (gather_phase(stored, rank, bucket.group, collective) for collective in self.collectives)
        # Never mirrored: the summed buffer must be zero except for results, but the inbox is full of pieces.
        return BucketProgram(bucket, mine, gather, back[0] if back else None, False)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        stored, parts = dict.fromkeys(bucket.group, 0), dict.fromkeys(bucket.group, 0)
        held: dict[int, Counter[int]] = {}
        kinds = (pieces.kinds[matrix] for matrix in bucket.matrices)
        for (kind, owner), count in Counter(zip(kinds, bucket.owners or repeat(None), strict=False)).items():
            for rank, elements in pieces.holders(kind, bucket.group).on_rank.items():
                stored[rank] += count * elements
                parts[rank] += count
            ranks = self._orthogonalizing_ranks(bucket, pieces, kind, owner)
            held.setdefault(kind, Counter()).update(dict.fromkeys(ranks, count))
        whole, flows, mine, calls = sum(stored.values()), ring(stored, pieces), counts(held), len(self.collectives)
        result = {}
        for rank, kept in stored.items():
            sent, received = kept * (len(bucket.group) - 1), whole - kept
            if calls == 2:
                sent = received = sent + received
            buffers = (kept, whole, whole * (calls - 1))
            flow = (flows[rank],) * calls
            result[rank] = BucketTotals(mine.get(rank, ()), kept, sent, received, buffers, flow, calls, parts[rank])
        return result


class AllGatherReduceScatter(AllGather):
    """All-gather to the owners; the results return as a reduce-scatter of a sum with zeros."""

    # Sends as many times the bytes of an all-to-all as there are ranks. For networks with a slow all-to-all, and for
    # comparison: xtuner uses the pattern for remainder matrices.

    name = "all_gather_reduce_scatter"
    has_owners = True
    collectives = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern for pattern in (AllToAll(), AllGatherReduceScatter(), AllGather(), Hierarchical())
}
"""The values of the option `exchange`, and the automatic patterns."""
