"""The exchange patterns by name: the all-to-all with and without an all-gather over replicas, all-gathers, two hops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

from ..layout.intervals import Pieces, Ranks
from ..layout.types import Bucket
from .all_to_all import RETURN, AllToAll, Pattern
from .phases import BucketProgram, Collective, gather_phase
from .two_hops import TwoHops


class Hierarchical(AllToAll):
    """All-to-all within the owner's replica, then an all-gather of the results over replicas.

    Falls back to all_to_all if a bucket has a single replica or if its matrices' replicas differ.
    """

    # With few matrices, an owner that sends results to 128 replicas is the busiest rank. Here each replica group, the
    # ranks with equal pieces of different replicas, all-gathers the results.

    name = "hierarchical"

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        replicas = replicas_in(bucket, pieces)
        if not replicas:
            return super().program(bucket, rank, pieces)
        place = next(ranks.index(rank) for ranks in replicas if rank in ranks)
        within = {ranks[place]: owned_within(bucket, ranks) for ranks in replicas}
        run = super().program(within[rank], rank, pieces)
        # In the order of the member's home buffer. This rank stores an equal piece of each matrix.
        stored = {
            member: [(parcel.matrix, parcel.piece) for parcel in self.phase(part, member, pieces, RETURN).home]
            for member, part in within.items()
        }
        replica_gather = gather_phase(stored, rank, tuple(sorted(within)), Collective.ALL_GATHER)
        return replace(run, bucket=bucket, replica_gather=replica_gather)

    def groups(self, bucket: Bucket, pieces: Pieces) -> tuple[Iterable[Ranks], Iterable[Ranks]]:
        if not (replicas := replicas_in(bucket, pieces)):
            return super().groups(bucket, pieces)
        ascending = [[tuple(sorted(ranks)) for ranks in sets] for sets in (replicas, zip(*replicas, strict=True))]
        return [ranks for ranks in ascending[0] if len(ranks) > 1], ascending[1]


def replicas_in(bucket: Bucket, pieces: Pieces) -> Sequence[Ranks]:
    """The ranks of each replica of a bucket's matrices; equal positions store equal pieces.

    Empty unless all matrices have several replicas, on the same sets of ranks.
    """
    kinds = {pieces.kinds[matrix] for matrix in bucket.matrices}
    replica_sets = {pieces.replicas(kind, bucket.group) for kind in kinds}
    replicas = replica_sets.pop() if len(replica_sets) == 1 else ()
    return replicas if len(replicas) > 1 and len({len(ranks) for ranks in replicas}) == 1 else ()


def owned_within(bucket: Bucket, ranks: Ranks) -> Bucket:
    """The matrices of a bucket with owners among these ranks, in a bucket of the ranks."""
    pairs = [pair for pair in zip(bucket.matrices, bucket.owners, strict=True) if pair[1] in ranks]
    matrices, owners = tuple(matrix for matrix, _ in pairs), tuple(owner for _, owner in pairs)
    return replace(bucket, group=tuple(sorted(ranks)), matrices=matrices, owners=owners)


class AllGather(Pattern):
    """All-gather of all pieces; every holder of a matrix orthogonalizes the matrix, without a return.

    Attributes:
        collectives: of the gather and, if the bucket has owners, of the return. Each moves all pieces.
    """

    name = "all_gather"
    has_owners = False
    collectives: tuple[Collective, ...] = (Collective.ALL_GATHER,)

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        stored = {
            peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
            for peer in bucket.group
        }
        owners = zip(bucket.matrices, bucket.owners or repeat(None), strict=False)
        mine = tuple(m for m, owner in owners if rank == owner or (owner is None and pieces.find(m, rank) is not None))
        gather, *back = (gather_phase(stored, rank, bucket.group, collective) for collective in self.collectives)
        # Never mirrored: the summed buffer must be zero except for results, but the inbox is full of pieces.
        return BucketProgram(bucket, mine, gather, back[0] if back else None, False)


class AllGatherReduceScatter(AllGather):
    """All-gather to the owners; the results return as a reduce-scatter of a sum with zeros."""

    # Sends as many times the bytes of an all-to-all as there are ranks. For networks with a slow all-to-all, and for
    # comparison: xtuner uses the pattern for remainder matrices.

    name = "all_gather_reduce_scatter"
    has_owners = True
    collectives = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern for pattern in (AllToAll(), TwoHops(), AllGatherReduceScatter(), AllGather(), Hierarchical())
}
"""The values of the option `exchange`, and the automatic patterns."""
