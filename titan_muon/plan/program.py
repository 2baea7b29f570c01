"""One rank's part of a plan: its buckets, and the order of their stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from .cost.batches import batches
from .exchange.all_gather import PATTERNS
from .exchange.phases import BucketProgram, Collective, Parcel, Phase, parcels
from .terms.layout import Geometries
from .terms.pieces import Pieces, Ranks
from .terms.schedule import ACTS, Act, late_rounds, schedule
from .terms.slices import teams_in
from .terms.types import Bucket, Plan

__all__ = ["BucketProgram", "Collective", "Parcel", "Phase", "Program", "make_program"]


@dataclass(frozen=True)
class Program:
    """Everything one rank does in a step, in the order of `acts`.

    Attributes:
        rank: the global rank.
        buckets: the rank's buckets: those that travel, in the order of the plan, and then the local ones.
        rounds: by round, the indices of its buckets: none, one, or several if the rank is in several groups.
        slots: sets of buffers.
        acts: (act, index of a bucket). Every rank has the acts of its buckets in the order of the plan's schedule, so
            that each process group sees its collectives in one order.
        teams: by slice of a matrix that the rank orthogonalizes, the owners of all slices of the matrix, in order.
    """

    rank: int
    buckets: tuple[BucketProgram, ...]
    rounds: tuple[tuple[int, ...], ...]
    buffer_sets: int
    acts: tuple[tuple[Act, int], ...]
    teams: Mapping[int, tuple[int, ...]]

    @property
    def local(self) -> tuple[BucketProgram, ...]:
        """The local buckets: batches of matrices that this rank stores whole."""
        return tuple(run for run in self.buckets if run.local)

    @cached_property
    def late(self) -> frozenset[int]:
        """The buckets that are applied after every orthogonalization, see `late_rounds`."""
        return frozenset(
            bucket for number in late_rounds(self.buffer_sets, len(self.rounds)) for bucket in self.rounds[number]
        )

    @cached_property
    def first_gathers(self) -> tuple[int, ...]:
        """The buckets whose gathers begin the step, in order."""
        first = takewhile(lambda item: item[0] is Act.GATHER and not self.buckets[item[1]].local, self.acts)
        return tuple(bucket for _, bucket in first)

    def buffer_set(self, index: int) -> tuple[int, int]:
        """Which buffers a bucket uses: those of its round's slot, and of these the ones for its place in the round."""
        number = self.buckets[index].bucket.round
        return number % self.buffer_sets, self.rounds[number].index(index)


def collective_ranks(plan: Plan, geometries: Geometries) -> tuple[set[Ranks], set[Ranks]]:
    """The ranks of each gather and return of any rank, and those of each collective over copies."""
    pieces, patterns = Pieces(plan.matrices, geometries), [(PATTERNS[each.exchange], each) for each in plan.buckets]
    return (
        {ranks for pattern, bucket in patterns for ranks in pattern.groups(bucket, pieces)},
        {ranks for pattern, bucket in patterns for ranks in pattern.replica_groups(bucket, pieces)},
    )


def replicated_plain(plan: Plan) -> tuple[int, ...]:
    """The plain tensors, by index, of which one rank's result goes to all ranks."""
    # A DTensor's gradients come from one collective. A plain one's may not have been reduced, which would go unseen.
    travelling = {plan.matrices[number].parameter for bucket in plan.buckets for number in bucket.matrices}
    return tuple(index for index in sorted(travelling) if plan.parameters[index].plain)


def workers(plan: Plan, geometries: Geometries) -> list[Ranks]:
    """By matrix, the ranks that orthogonalize all of it, ascending."""
    found = [set(ranks) for ranks in plan.local]
    for bucket in plan.buckets:
        for place, number in enumerate(bucket.matrices):
            matrix = plan.matrices[number]
            if bucket.owners:
                found[number].add(bucket.owners[place])
            else:
                # Without owners, the matrix may be in a bucket of each replica, and every holder does the work.
                pieces = geometries[matrix.parameter].pieces
                found[number].update(rank for rank in bucket.group if matrix.index in pieces[rank])
    return [tuple(sorted(ranks)) for ranks in found]


def make_program(plan: Plan, rank: int, geometries: Geometries | None = None) -> Program:
    """The part of `rank` in the plan."""
    pieces = Pieces(plan.matrices, Geometries(plan.parameters) if geometries is None else geometries)
    buckets = tuple(PATTERNS[b.exchange].program(b, rank, pieces) for b in plan.buckets if rank in b.group)
    rounds = tuple(
        tuple(i for i, program in enumerate(buckets) if program.bucket.round == number) for number in range(plan.rounds)
    )
    buffer_sets = max(1, min(plan.buffer_sets, plan.rounds))
    teams = {
        first + ranks.index(rank): ranks
        for run in buckets
        for first, ranks in teams_in(run.bucket, plan.matrices).items()
        if rank in ranks
    }
    whole = [index for index, ranks in enumerate(plan.local) if rank in ranks]
    local = [_local_bucket(chosen, rank, pieces) for chosen in batches(whole, plan.matrices, plan.works)]
    opening, turns = schedule(plan.rounds, buffer_sets)
    acts = (
        *((act, index) for act, number in opening for index in rounds[number]),
        # One local bucket after the other, because all batches share one workspace.
        *((act, len(buckets) + index) for index in range(len(local)) for act in ACTS),
        *((act, index) for act, number in turns for index in rounds[number]),
    )
    return Program(rank, (*buckets, *local), rounds, buffer_sets, acts, teams)


def _local_bucket(matrices: tuple[int, ...], rank: int, pieces: Pieces) -> BucketProgram:
    """A batch of matrices that the rank stores whole, as a bucket whose phases move nothing."""
    stored = {rank: [(m, pieces.geometry(m).pieces[rank][pieces.matrices[m].index]) for m in matrices]}
    bucket = Bucket("all_to_all", (rank,), matrices, (rank,) * len(matrices))
    phase = Phase(Collective.ALL_TO_ALL, parcels(stored, (rank,)), (), (0,), (0,), travels=False, group=(rank,))
    return BucketProgram(bucket, matrices, phase, phase, mirrored=True)
