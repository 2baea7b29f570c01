"""Hierarchical all-to-all: an all-to-all within the owner's replica, then an all-gather over replicas."""

# With few matrices, an owner that sends results to 128 replicas is the busiest rank. Here each replica group, the ranks
# with equal pieces of different replicas, all-gathers the results.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..terms.pieces import Pieces, Ranks
from ..terms.types import Bucket
from .all_to_all import RETURN, AllToAll
from .pattern import BucketTotals, ring
from .phases import BucketProgram, Collective, gather_phase


class Hierarchical(AllToAll):
    """Falls back to all_to_all if a bucket has a single replica or if its matrices' replicas differ."""

    name = "hierarchical"
    spreads = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        replicas = replicas_in(bucket, pieces)
        if not replicas:
            return super().program(bucket, rank, pieces)
        place = next(ranks.index(rank) for ranks in replicas if rank in ranks)
        within = {ranks[place]: _within(bucket, ranks) for ranks in replicas}
        run = super().program(within[rank], rank, pieces)
        assert run.returning is not None, "an all-to-all returns"
        stored = {}
        for member, part in within.items():
            phase = run.returning if member == rank else self.phase(part, member, pieces, RETURN)
            # In the order of the member's home buffer. This rank stores an equal piece of each matrix.
            stored[member] = [(parcel.matrix, parcel.piece) for parcel in phase.home]
        replica_gather = gather_phase(stored, rank, tuple(sorted(within)), Collective.ALL_GATHER)
        return replace(run, bucket=bucket, replica_gather=replica_gather)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        replicas = replicas_in(bucket, pieces)
        if not replicas:
            return super().totals(bucket, pieces)
        within: dict[int, BucketTotals] = {}
        for ranks in replicas:
            within |= super().totals(_within(bucket, ranks), pieces)
        result = {}
        for replica_group in zip(*replicas, strict=True):
            stored = {rank: within[rank].stored for rank in sorted(replica_group)}
            whole, flows = sum(stored.values()), ring(stored, pieces)
            parts = sum(within[rank].pieces for rank in replica_group)
            for rank, kept in stored.items():
                own = within[rank]
                result[rank] = own._replace(
                    stored=whole,
                    sent=own.sent + kept * (len(replica_group) - 1),
                    received=own.received + whole - kept,
                    buffers=(*own.buffers, whole),
                    phases=(*own.phases, flows[rank]),
                    collectives=own.collectives + bool(whole),
                    pieces=parts,
                )
        return result

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        replicas = replicas_in(bucket, pieces)
        return [tuple(sorted(ranks)) for ranks in replicas if len(ranks) > 1] if replicas else (bucket.group,)

    def replica_groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        return [tuple(sorted(replica_group)) for replica_group in zip(*replicas_in(bucket, pieces), strict=True)]


def replicas_in(bucket: Bucket, pieces: Pieces) -> Sequence[Ranks]:
    """The ranks of each replica of a bucket's matrices; equal positions store equal pieces.

    Empty unless all matrices have several replicas, on the same sets of ranks.
    """
    kinds = {pieces.kinds[matrix] for matrix in bucket.matrices}
    replica_sets = {pieces.replicas(kind, bucket.group) for kind in kinds}
    replicas = replica_sets.pop() if len(replica_sets) == 1 else ()
    return replicas if len(replicas) > 1 and len({len(ranks) for ranks in replicas}) == 1 else ()


def _within(bucket: Bucket, ranks: Ranks) -> Bucket:
    pairs = [pair for pair in zip(bucket.matrices, bucket.owners, strict=True) if pair[1] in ranks]
    matrices, owners = tuple(matrix for matrix, _ in pairs), tuple(owner for _, owner in pairs)
    return replace(bucket, group=tuple(sorted(ranks)), matrices=matrices, owners=owners)
