"""One rank's part of a plan: what it does at home, in each bucket, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .exchange.all_gather import PATTERNS
from .exchange.phases import BucketProgram, Collective, Leg, Parcel
from .terms.layout import Geometries
from .terms.pieces import Pieces, Ranks
from .terms.schedule import Turn, late_rounds, schedule
from .terms.slices import teams_in
from .terms.types import Piece, Plan

__all__ = ["BucketProgram", "Collective", "Home", "Leg", "Parcel", "Program", "make_program"]


@dataclass(frozen=True)
class Home:
    """A matrix that this rank stores whole and orthogonalizes without communication."""

    matrix: int
    piece: Piece


@dataclass(frozen=True)
class Program:
    """Everything one rank does in a step, in the order of `turns`.

    `rounds[k]` are the indices of its buckets of round k: none, one, or with several groups more. `teams` are, for each
    slice of a matrix that it orthogonalizes, the owners of all slices of that matrix, in order.
    """

    rank: int
    home: tuple[Home, ...]
    buckets: tuple[BucketProgram, ...]
    rounds: tuple[tuple[int, ...], ...]
    slots: int
    turns: tuple[Turn, ...]
    teams: Mapping[int, tuple[int, ...]]

    @cached_property
    def late(self) -> frozenset[int]:
        """The buckets that are applied when all are orthogonalized, see `late_rounds`."""
        return frozenset(
            bucket for number in late_rounds(self.slots, len(self.rounds)) for bucket in self.rounds[number]
        )

    def slot(self, index: int) -> tuple[int, int]:
        """Which buffers a bucket uses: those of its round's slot, and of these the ones for its place in the round."""
        number = self.buckets[index].bucket.round
        return number % self.slots, self.rounds[number].index(index)


def collective_ranks(plan: Plan, geometries: Geometries) -> tuple[set[Ranks], set[Ranks]]:
    """The ranks of each gather and return of any rank, and those of each collective over copies."""
    pieces, patterns = Pieces(plan.matrices, geometries), [(PATTERNS[each.exchange], each) for each in plan.buckets]
    return (
        {ranks for pattern, bucket in patterns for ranks in pattern.groups(bucket, pieces)},
        {ranks for pattern, bucket in patterns for ranks in pattern.lines(bucket, pieces)},
    )


def make_program(plan: Plan, rank: int, geometries: Geometries | None = None) -> Program:
    """The part of `rank` in the plan."""
    pieces = Pieces(plan.matrices, Geometries(plan.parameters) if geometries is None else geometries)
    home = tuple(
        Home(m, pieces.geometry(m).pieces[rank][plan.matrices[m].index])
        for m, ranks in enumerate(plan.home)
        if rank in ranks
    )
    buckets = tuple(PATTERNS[b.exchange].program(b, rank, pieces) for b in plan.buckets if rank in b.group)
    rounds = tuple(
        tuple(i for i, program in enumerate(buckets) if program.bucket.round == number) for number in range(plan.rounds)
    )
    slots = max(1, min(plan.slots, plan.rounds))
    teams = {
        first + ranks.index(rank): ranks
        for run in buckets
        for first, ranks in teams_in(run.bucket, plan.matrices).items()
        if rank in ranks
    }
    return Program(rank, home, buckets, rounds, slots, schedule(plan.rounds, slots), teams)
