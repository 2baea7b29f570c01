"""How long each part of a bucket takes on a machine, on every rank of its group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..exchange.pattern import BucketTotals, KindCounts
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces, Ranks
from ..terms.slices import teams_in
from ..terms.types import Bucket, Matrix
from ..terms.work import FLOAT32_PASSES, Passes, Work
from .batches import counted_batches

MOMENTUM_BYTES = 12
"""For an element of a piece: a float32 gradient is read, and a float32 momentum read and written."""
APPLY_BYTES = 8
"""For an element of a piece: a float32 parameter is read and written."""


class OwnerTime(NamedTuple):
    """Cost of the matrices that one rank orthogonalizes in a bucket, or locally.

    Attributes:
        elements: of the matrices.
        seconds: of Newton-Schulz.
        assembled: bytes of the largest batch that is made whole.
        iteration: most bytes that the iteration on a batch takes.
        matrices: number of matrices, slices included.
        flops: of Newton-Schulz.
        batches: number of batches.
        team_sent: bytes to the owners of other slices of the same matrices.
        team_calls: collectives among them.
    """

    elements: int
    seconds: float
    assembled: int
    iteration: int
    matrices: int = 0
    flops: int = 0
    batches: int = 0
    team_sent: int = 0
    team_calls: int = 0


class LocalTime(NamedTuple):
    """Cost of the matrices that one rank stores whole: Newton-Schulz, and seconds of momentum and apply."""

    owned: OwnerTime
    passes: float

    @property
    def seconds(self) -> float:
        """Seconds of all of it."""
        return self.owned.seconds + self.passes


class Costs:
    """What turns a plan's counts into seconds.

    Args:
        pieces: of the plan's matrices.
        works: the plan's.
        wire_bytes: of an element in transit.
        machine: what the ranks run on.
        passes: temporary memory of the element-wise stages.

    Attributes:
        longest_row: columns of the widest matrix.
    """

    def __init__(
        self,
        pieces: Pieces,
        works: Sequence[Work],
        wire_bytes: int,
        machine: MachineRates,
        passes: Passes = FLOAT32_PASSES,
    ) -> None:
        self.pieces, self.works, self.wire_bytes, self.machine = pieces, works, wire_bytes, machine
        self.passes = passes
        self.longest_row = max((pieces.matrices[example].cols for example in pieces.examples), default=0)
        self._owned: dict[KindCounts, OwnerTime] = {}

    def owned(self, counts: KindCounts) -> OwnerTime:
        """What it takes to orthogonalize so many matrices of these kinds, in batches."""
        # Most ranks have equally many of the same kinds.
        if counts not in self._owned:
            self._owned[counts] = self._find(counts)
        return self._owned[counts]

    def local(self, local: Sequence[Ranks]) -> dict[int, LocalTime]:
        """The cost locally of every rank of the plan; `local` are the ranks of each matrix."""
        found: dict[int, dict[int, int]] = {rank: {} for rank in self.pieces.ranks()}
        for kind, ranks in zip(self.pieces.kinds, local, strict=True):
            for rank in ranks:
                found[rank][kind] = found[rank].get(kind, 0) + 1
        # Momentum writes the matrix in the dtype of the wire, and its result is read from there.
        moved = MOMENTUM_BYTES + APPLY_BYTES + 2 * self.wire_bytes
        owned = {rank: self.owned(tuple(sorted(mine.items()))) for rank, mine in found.items()}
        return {rank: LocalTime(one, self.machine.pass_seconds(one.elements * moved)) for rank, one in owned.items()}

    def _find(self, counts: KindCounts) -> OwnerTime:
        found = OwnerTime(0, 0.0, 0, 0)
        for matrix, size in counted_batches(counts, self.pieces, self.works):
            work = self.works[matrix.work]
            found = OwnerTime(
                elements=found.elements + size * matrix.numel,
                seconds=found.seconds + self.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), size),
                assembled=max(found.assembled, size * matrix.numel * self.wire_bytes),
                iteration=max(found.iteration, size * max(work.bytes, matrix.numel * self.passes.finish_bytes)),
                matrices=found.matrices + size,
                flops=found.flops + size * matrix.flops,
                batches=found.batches + 1,
                team_sent=found.team_sent + (size * work.team.sent if work.team else 0),
                team_calls=found.team_calls + (size * work.team.calls if work.team else 0),
            )
        return found

    def alone(self, matrix: Matrix) -> float:
        """Seconds of the products of one matrix, without launches, which weigh less in batches."""
        work = self.works[matrix.work]
        return work.flops / self.machine.rate(work.dtype, min(matrix.rows, matrix.cols))

    def copied_bytes(self, elements: int) -> int:
        """Bytes that are read and written to make matrices whole and to fill the buffer that goes back."""
        return elements * 2 * 2 * self.wire_bytes


@dataclass(frozen=True)
class BucketTimes:
    """Seconds of a bucket: on each rank of its group, in its order, and of its collectives.

    Attributes:
        group: positions of the ranks among all ranks of the plan.
        pack: momentum of the stored pieces, and packing what leaves.
        owned: Newton-Schulz.
        copies: making matrices whole, and filling the buffer that goes back.
        apply: decay and update of the stored pieces.
        legs: collectives, the second, if there is one, the return: how long the links of each rank are at work.
        teams: for each matrix that is sliced the positions of its owners, and the seconds that are of it in `owned`.
        latency: of each collective.
    """

    group: tuple[int, ...]
    pack: tuple[float, ...]
    owned: tuple[OwnerTime, ...]
    copies: tuple[float, ...]
    apply: tuple[float, ...]
    phases: tuple[tuple[float, ...], ...]
    latency: float
    teams: tuple[tuple[tuple[int, ...], float], ...] = ()


def bucket_times(
    bucket: Bucket, totals: Mapping[int, BucketTotals], costs: Costs, place: Mapping[int, int]
) -> BucketTimes:
    """The times of a bucket; `place` is the position of each rank."""
    machine, wire = costs.machine, costs.wire_bytes
    found = [totals[rank] for rank in bucket.group]
    across = len({costs.pieces.node(rank) for rank in bucket.group}) > 1
    latency = machine.network.latency if across else machine.node.latency
    there, *back = zip(*(tuple(flow.seconds(wire, machine) for flow in one.phases) for one in found), strict=True)
    owned = tuple(costs.owned(one.owned) for one in found)
    return BucketTimes(
        group=tuple(place[rank] for rank in bucket.group),
        pack=tuple(machine.pass_seconds(one.stored * (MOMENTUM_BYTES + wire)) for one in found),
        owned=owned,
        copies=tuple(machine.pass_seconds(costs.copied_bytes(one.elements)) for one in owned),
        apply=tuple(machine.pass_seconds(one.stored * (APPLY_BYTES + wire)) for one in found),
        phases=(there, *_one_after_another(back, latency)),
        latency=latency,
        teams=tuple(_teams(bucket, costs, place)),
    )


def _one_after_another(back: Sequence[tuple[float, ...]], latency: float) -> Iterator[tuple[float, ...]]:
    """The legs behind the first as one, if there are any: a return, and what copies share behind it."""
    if back:
        further = latency * (len(back) - 1)
        yield tuple(sum(each) + (further if any(each) else 0.0) for each in zip(*back, strict=True))


def _teams(bucket: Bucket, costs: Costs, place: Mapping[int, int]) -> Iterator[tuple[tuple[int, ...], float]]:
    for first, ranks in teams_in(bucket, costs.pieces.matrices).items():
        yield tuple(place[rank] for rank in ranks), costs.owned(((costs.pieces.kinds[first], 1),)).seconds
