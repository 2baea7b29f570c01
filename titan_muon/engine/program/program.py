"""A rank's part of a plan: buckets, and the order of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout.intervals import Geometries, Pieces, Ranks
from ..layout.types import Bucket, Matrix, Plan
from ..layout.work import Work
from .patterns import PATTERNS
from .phases import Act, BucketProgram, Collective, Phase, late_rounds, parcels, schedule


@dataclass(frozen=True)
class Program:
    """The buckets and acts of a rank in a step.

    Attributes:
        buckets: first the plan's, then the local buckets.
        rounds: by round, the indices of the rank's buckets: several for a rank in several groups.
        acts: (act, index of a bucket), so that each process group launches collectives in equal order on all ranks.
    """

    rank: int
    buckets: tuple[BucketProgram, ...]
    rounds: tuple[tuple[int, ...], ...]
    buffer_sets: int
    acts: tuple[tuple[Act, int], ...]

    @property
    def local(self) -> tuple[BucketProgram, ...]:
        return tuple(run for run in self.buckets if run.local)

    @cached_property
    def late(self) -> frozenset[int]:
        return frozenset(
            bucket for number in late_rounds(self.buffer_sets, len(self.rounds)) for bucket in self.rounds[number]
        )

    def buffer_set(self, index: int) -> tuple[int, int]:
        """The buffer set of a bucket's round, and the bucket's position in the round."""
        number = self.buckets[index].bucket.round
        return number % self.buffer_sets, self.rounds[number].index(index)


def collective_ranks(plan: Plan, geometries: Geometries) -> tuple[set[Ranks], set[Ranks]]:
    """The ranks of each gather and return, and of each collective over replicas."""
    pieces = Pieces(plan.matrices, geometries, plan.ranks_per_node)
    groups = [PATTERNS[bucket.exchange].groups(bucket, pieces) for bucket in plan.buckets]
    return {ranks for gathers, _ in groups for ranks in gathers}, {ranks for _, spreads in groups for ranks in spreads}


def replicated_plain(plan: Plan) -> tuple[int, ...]:
    """The plain tensors, by index, with a result sent from a single rank to all ranks."""
    # Their gradients may differ between ranks unnoticed, unlike a DTensor's.
    travelling = {plan.matrices[number].parameter for bucket in plan.buckets for number in bucket.matrices}
    return tuple(index for index in sorted(travelling) if plan.parameters[index].plain)


def orthogonalizing_ranks(plan: Plan, geometries: Geometries) -> list[Ranks]:
    """The ranks that orthogonalize each matrix whole, ascending."""
    ranks_of = [set(ranks) for ranks in plan.local]
    for bucket in plan.buckets:
        for place, number in enumerate(bucket.matrices):
            matrix = plan.matrices[number]
            if bucket.owners:
                ranks_of[number].add(bucket.owners[place])
            else:
                # Without owners every holder orthogonalizes, in a bucket per replica.
                geometry = geometries[matrix.parameter]
                ranks_of[number].update(rank for rank in bucket.group if matrix.index in geometry.pieces(rank))
    return [tuple(sorted(ranks)) for ranks in ranks_of]


def make_program(plan: Plan, rank: int, geometries: Geometries | None = None) -> Program:
    """The program of `rank`."""
    geometries = Geometries(plan.parameters) if geometries is None else geometries
    pieces = Pieces(plan.matrices, geometries, plan.ranks_per_node)
    buckets = tuple(PATTERNS[b.exchange].program(b, rank, pieces) for b in plan.buckets if rank in b.group)
    rounds = tuple(
        tuple(i for i, program in enumerate(buckets) if program.bucket.round == number) for number in range(plan.rounds)
    )
    buffer_sets = max(1, min(plan.buffer_sets, plan.rounds))
    whole = [index for index, ranks in enumerate(plan.local) if rank in ranks]
    local = [_local_bucket(chosen, rank, pieces) for chosen in batches(whole, plan.matrices, plan.works)]
    opening, turns = schedule(plan.rounds, buffer_sets)
    acts = (
        *((act, index) for act, number in opening for index in rounds[number]),
        # One after another, because all batches share a workspace.
        *((act, len(buckets) + index) for index in range(len(local)) for act in Act),
        *((act, index) for act, number in turns for index in rounds[number]),
    )
    return Program(rank, (*buckets, *local), rounds, buffer_sets, acts)


def _local_bucket(matrices: tuple[int, ...], rank: int, pieces: Pieces) -> BucketProgram:
    stored = {rank: [(m, pieces.geometry(m).pieces(rank)[pieces.matrices[m].index]) for m in matrices]}
    bucket = Bucket("all_to_all", (rank,), matrices, (rank,) * len(matrices))
    phase = Phase(Collective.ALL_TO_ALL, parcels(stored, (rank,)), (), (0,), (0,), travels=False, group=(rank,))
    return BucketProgram(bucket, matrices, phase, phase, mirrored=True)


def batches(chosen: Sequence[int], matrices: Sequence[Matrix], works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Indices of each batch for a single orthogonalization: matrices of equal shape and work."""
    equal: dict[tuple[int, int, int], list[int]] = {}
    for index in chosen:
        matrix = matrices[index]
        equal.setdefault((matrix.rows, matrix.cols, matrix.work), []).append(index)
    result = []
    for (_, _, work), indices in equal.items():
        left = iter(indices)
        result += [tuple(next(left) for _ in range(size)) for size in batch_sizes(len(indices), works[work])]
    return tuple(result)


def batch_sizes(count: int, work: Work) -> list[int]:
    """Sizes of the batches of `count` equal matrices."""
    # 9 matrices with room for 8 become 5 and 4: the largest batch sets the workspace, and small batches are slow.
    parts = -(-count // work.batch)
    size = -(-count // parts)
    return [size] * (count // size) + ([count % size] if count % size else [])
