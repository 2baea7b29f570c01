"""Seconds of each part of a bucket on a machine, for every rank of the group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..exchange.pattern import BucketTotals, KindCounts
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces, Ranks
from ..terms.slices import teams_in
from ..terms.types import Bucket, Matrix
from ..terms.work import FLOAT32_PASSES, NORMALIZING_BYTES, Passes, Work
from .batches import counted_batches


class OwnerTime(NamedTuple):
    """Cost of a rank's matrices in a bucket, or of its local matrices.

    `assembled`, `iteration`: most bytes of a batch, assembled and in the iteration. `team_*`: among the owners of
    slices.
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
    """`advance`, `apply`: seconds of the passes before and after Newton-Schulz."""

    owned: OwnerTime
    advance: float
    apply: float

    @property
    def passes(self) -> float:
        return self.advance + self.apply

    @property
    def seconds(self) -> float:
        return self.owned.seconds + self.passes


class Costs:
    """Seconds from a plan's counts, on a machine."""

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
        # Cached, because most ranks have equal counts.
        if counts not in self._owned:
            self._owned[counts] = self._find(counts)
        return self._owned[counts]

    def local(self, local: Sequence[Ranks]) -> dict[int, LocalTime]:
        by_kind: dict[int, dict[int, int]] = {rank: {} for rank in self.pieces.ranks()}
        for kind, ranks in zip(self.pieces.kinds, local, strict=True):
            for rank in ranks:
                by_kind[rank][kind] = by_kind[rank].get(kind, 0) + 1
        owned = {rank: self.owned(tuple(sorted(kinds.items()))) for rank, kinds in by_kind.items()}
        return {rank: self._local_time(time) for rank, time in owned.items()}

    def _local_time(self, owned: OwnerTime) -> LocalTime:
        normalized = self.machine.pass_seconds(owned.elements * NORMALIZING_BYTES)
        packed, applied = (f(owned.elements, owned.batches) for f in (self.pack_seconds, self.apply_seconds))
        return LocalTime(owned, packed + normalized, applied)

    def pack_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.passes.traffic
        return self.machine.pass_seconds(elements * moved.advance, calls * moved.advance_launches)

    def apply_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.passes.traffic
        return self.machine.pass_seconds(elements * moved.apply, calls * moved.apply_launches)

    def _find(self, counts: KindCounts) -> OwnerTime:
        total = OwnerTime(0, 0.0, 0, 0)
        for matrix, size in counted_batches(counts, self.pieces, self.works):
            work = self.works[matrix.work]
            total = OwnerTime(
                elements=total.elements + size * matrix.numel,
                seconds=total.seconds + self.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), size),
                assembled=max(total.assembled, size * matrix.numel * self.wire_bytes),
                iteration=max(total.iteration, size * max(work.bytes, matrix.numel * self.passes.finish_bytes)),
                matrices=total.matrices + size,
                flops=total.flops + size * matrix.flops,
                batches=total.batches + 1,
                team_sent=total.team_sent + (size * work.team.sent if work.team else 0),
                team_calls=total.team_calls + (size * work.team.calls if work.team else 0),
            )
        return total

    def alone(self, matrix: Matrix) -> float:
        work = self.works[matrix.work]
        return work.flops / self.machine.rate(work.dtype, min(matrix.rows, matrix.cols))

    def copied_bytes(self, elements: int) -> int:
        """Bytes moved to assemble matrices, to normalize them and to fill the return buffer."""
        return elements * (2 * 2 * self.wire_bytes + NORMALIZING_BYTES)


@dataclass(frozen=True)
class BucketTimes:
    """Seconds of a bucket on each rank of its group, in the order of `group`.

    Attributes:
        group: positions among all ranks of the plan.
        pack: momentum and packing of the local pieces.
        owned: Newton-Schulz.
        copies: assembling matrices, and filling the return buffer.
        phases: link seconds in the gather and, if any, in the return.
        teams: by sliced matrix, the positions of the owners, and the seconds within `owned`.
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
    """The times of a bucket. `place`: position of each rank among the plan's ranks."""
    machine, wire = costs.machine, costs.wire_bytes
    rank_totals = [totals[rank] for rank in bucket.group]
    across = len({costs.pieces.node(rank) for rank in bucket.group}) > 1
    latency = machine.network.latency if across else machine.node.latency
    gather, *back = zip(*(tuple(f.seconds(wire, machine) for f in t.phases) for t in rank_totals), strict=True)
    owned = tuple(costs.owned(t.owned) for t in rank_totals)
    return BucketTimes(
        group=tuple(place[rank] for rank in bucket.group),
        pack=tuple(costs.pack_seconds(t.stored) for t in rank_totals),
        owned=owned,
        copies=tuple(machine.pass_seconds(costs.copied_bytes(time.elements)) for time in owned),
        apply=tuple(costs.apply_seconds(t.stored) for t in rank_totals),
        phases=(gather, *_one_after_another(back, latency)),
        latency=latency,
        teams=tuple(
            (tuple(place[rank] for rank in ranks), costs.owned(((costs.pieces.kinds[first], 1),)).seconds)
            for first, ranks in teams_in(bucket, costs.pieces.matrices).items()
        ),
    )


def _one_after_another(back: Sequence[tuple[float, ...]], latency: float) -> Iterator[tuple[float, ...]]:
    if back:
        further = latency * (len(back) - 1)
        yield tuple(sum(rank) + (further if any(rank) else 0.0) for rank in zip(*back, strict=True))
