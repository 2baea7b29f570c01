"""The hierarchical all-to-all: an all-to-all within the copy that an owner is part of, an all-gather over copies."""

# An owner that sends its result to every copy is the busiest rank where matrices are few: of 128 replicas each with 8
# shards it sends 128 times the matrix, while ranks without a matrix send nothing. Here it sends its own copy's pieces
# alone, and all ranks that store the same piece of each copy, a line, share what their copies' owners have sent them.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..terms.pieces import Pieces
from ..terms.types import Bucket
from .all_to_all import AllToAll
from .pattern import BucketTotals, Ranks, ring
from .phases import BucketProgram, Collective, Leg, Parcel


class Part(NamedTuple):
    """A copy's part of a bucket, which its own ranks own; and the rank of that copy on some line."""

    bucket: Bucket
    member: int


class Hierarchical(AllToAll):
    """As an all-to-all, but owners return to their own copy alone, and copies all-gather results among each other.

    In buckets that have one copy, or of matrices whose copies are on different sets of ranks, as an all-to-all.
    """

    name = "hierarchical"
    spreads = True
    automatic = True

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        copies = copies_in(bucket, pieces)
        if not copies:
            return super().program(bucket, rank, pieces)
        parts = _parts(bucket, copies, rank)
        own = next(part for part in parts if part.member == rank)
        run = super().program(own.bucket, rank, pieces)
        assert run.returning is not None, "an all-to-all returns"
        received: list[Parcel] = []
        sizes: list[int] = []
        for part in parts:
            there = run.returning if part is own else self._leg(part.bucket, part.member, pieces, gathers=False)
            sizes.append(there.home_numel)
            start = sum(sizes[:-1])
            # In the order in which they are in that rank's home buffer, whose piece of each is this rank's own.
            received += [Parcel(p.matrix, part.member, p.piece, start + p.offset) for p in there.home]
        line = tuple(part.member for part in parts)
        travels = any(sizes)
        spreading = Leg(
            Collective.ALL_GATHER, run.returning.home, tuple(received), (), tuple(sizes), travels=travels, group=line
        )
        return replace(run, bucket=bucket, spreading=spreading)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        copies = copies_in(bucket, pieces)
        if not copies:
            return super().totals(bucket, pieces)
        within: dict[int, BucketTotals] = {}
        for copy in copies:
            within |= super().totals(_within(bucket, copy), pieces)
        found = {}
        for line in zip(*copies, strict=True):
            stored = {rank: within[rank].stored for rank in sorted(line)}
            whole, flows = sum(stored.values()), ring(stored, pieces)
            for rank, kept in stored.items():
                own, (home, inbox, outbox) = within[rank], within[rank].buffers
                found[rank] = own._replace(
                    stored=whole,
                    sent=own.sent + kept * (len(line) - 1),
                    received=own.received + whole - kept,
                    buffers=(home, inbox, outbox, whole),
                    legs=(*own.legs, flows[rank]),
                    collectives=own.collectives + bool(whole),
                )
        return found

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        copies = copies_in(bucket, pieces)
        # A copy on one rank is whole there, and goes nowhere.
        return [tuple(sorted(copy)) for copy in copies if len(copy) > 1] if copies else (bucket.group,)

    def lines(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        return [tuple(sorted(line)) for line in zip(*copies_in(bucket, pieces), strict=True)]


def copies_in(bucket: Bucket, pieces: Pieces) -> Sequence[Ranks]:
    """The ranks of each copy of a bucket's matrices, at equal places those of equal pieces; empty unless all of its
    matrices have several copies, on the same sets of ranks."""
    found = {pieces.copies(kind, bucket.group) for kind in {pieces.kinds[matrix] for matrix in bucket.matrices}}
    copies = found.pop() if len(found) == 1 else ()
    return copies if len(copies) > 1 and _regular(copies) else ()


def _regular(copies: Sequence[Ranks]) -> bool:
    return len({len(copy) for copy in copies}) == 1


def _within(bucket: Bucket, copy: Ranks) -> Bucket:
    """What of a bucket the ranks of a copy own, as a bucket of these ranks."""
    members = frozenset(copy)
    chosen = [pair for pair in zip(bucket.matrices, bucket.owners, strict=True) if pair[1] in members]
    matrices, owners = tuple(matrix for matrix, _ in chosen), tuple(owner for _, owner in chosen)
    return replace(bucket, group=tuple(sorted(copy)), matrices=matrices, owners=owners)


def _parts(bucket: Bucket, copies: Sequence[Ranks], rank: int) -> list[Part]:
    """The parts of a bucket, in the order of a rank's line, which is ascending."""
    place = next(copy.index(rank) for copy in copies if rank in copy)
    return sorted((Part(_within(bucket, copy), copy[place]) for copy in copies), key=lambda part: part.member)
