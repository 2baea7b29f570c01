"""How long each part of a bucket takes on a machine, on every rank of its group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..exchange.pattern import BucketTotals, KindCounts
from ..terms.machine import Machine
from ..terms.pieces import Pieces
from ..terms.slices import teams_in
from ..terms.types import Bucket, Matrix
from ..terms.work import Work
from .batches import counted_batches

MOMENTUM_BYTES = 12
"""For an element of a piece: a float32 gradient is read, and a float32 momentum read and written."""
APPLY_BYTES = 8
"""For an element of a piece: a float32 parameter is read and written."""


class Owned(NamedTuple):
    """What orthogonalizing some matrices takes: their elements, seconds, and the bytes of the largest batch that is
    made whole and of the iteration on it."""

    elements: int
    seconds: float
    assembled: int
    iteration: int


class Costs:
    """What turns a plan's counts into seconds.

    Args:
        pieces: of the plan's matrices.
        works: the plan's.
        wire_bytes: of an element in transit.
        machine: what the ranks run on.
    """

    def __init__(self, pieces: Pieces, works: Sequence[Work], wire_bytes: int, machine: Machine) -> None:
        self.pieces, self.works, self.wire_bytes, self.machine = pieces, works, wire_bytes, machine
        self._owned: dict[KindCounts, Owned] = {}

    def owned(self, counts: KindCounts) -> Owned:
        """What it takes to orthogonalize so many matrices of these kinds, in batches."""
        # Most ranks have equally many of the same kinds.
        if counts not in self._owned:
            self._owned[counts] = self._find(counts)
        return self._owned[counts]

    def _find(self, counts: KindCounts) -> Owned:
        elements, seconds, assembled, iteration = 0, 0.0, 0, 0
        for matrix, size in counted_batches(counts, self.pieces, self.works):
            work = self.works[matrix.work]
            elements += size * matrix.numel
            seconds += self.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), size)
            assembled, iteration = max(assembled, size * matrix.numel), max(iteration, size * work.bytes)
        return Owned(elements, seconds, assembled * self.wire_bytes, iteration)

    def alone(self, matrix: Matrix) -> float:
        """Seconds of the products of one matrix, without launches, which weigh less in batches."""
        work = self.works[matrix.work]
        return work.flops / self.machine.rate(work.dtype, min(matrix.rows, matrix.cols))

    def copied_bytes(self, elements: int) -> int:
        """Bytes that are read and written to make matrices whole and to fill the buffer that goes back."""
        return elements * 2 * 2 * self.wire_bytes

    def home_passes(self, owned: Owned) -> float:
        """Seconds of momentum and apply on matrices that a rank stores whole."""
        # Momentum writes the matrix in the dtype of the wire, and its result is read from there.
        return self.machine.pass_seconds(owned.elements * (MOMENTUM_BYTES + APPLY_BYTES + 2 * self.wire_bytes))


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
    owned: tuple[Owned, ...]
    copies: tuple[float, ...]
    apply: tuple[float, ...]
    legs: tuple[tuple[float, ...], ...]
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
    there, *back = zip(*(tuple(flow.seconds(wire, machine) for flow in one.legs) for one in found), strict=True)
    owned = tuple(costs.owned(one.owned) for one in found)
    return BucketTimes(
        group=tuple(place[rank] for rank in bucket.group),
        pack=tuple(machine.pass_seconds(one.stored * (MOMENTUM_BYTES + wire)) for one in found),
        owned=owned,
        copies=tuple(machine.pass_seconds(costs.copied_bytes(one.elements)) for one in owned),
        apply=tuple(machine.pass_seconds(one.stored * (APPLY_BYTES + wire)) for one in found),
        legs=(there, *_one_after_another(back, latency)),
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
