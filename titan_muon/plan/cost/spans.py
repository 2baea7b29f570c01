"""The modelled step as spans: what each rank computes, and when its links are at work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...options import Overlap
from ..terms.layout import Geometries
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces
from ..terms.schedule import hidden_rounds, ordered_rounds
from ..terms.types import Plan
from .timeline import Clock, run_clock
from .times import BucketTimes, Costs, bucket_times
from .totals import Totals

STAGES = ("advance", "gather", "orthogonalize", "send_back", "apply")
LOCAL = -1
"""Bucket of local matrices."""


class Span(NamedTuple):
    """A stage of a bucket on a rank, in seconds from the start of the step. Gathers and returns are on the links."""

    rank: int
    stage: str
    bucket: int
    start: float
    stop: float


def spans(plan: Plan, machine: MachineRates, *, overlap: Overlap = "none") -> list[Span]:
    """The spans of every rank, by start, modelled like `timeline`."""
    pieces = Pieces(plan.matrices, Geometries(plan.parameters), machine.ranks_per_node)
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine, plan.passes)
    ranks = pieces.ranks()
    place = {rank: index for index, rank in enumerate(ranks)}
    totals = Totals(plan.buckets, pieces).of_buckets
    times = [bucket_times(b, t, costs, place) for b, t in zip(plan.buckets, totals, strict=True)]
    local = [time.seconds for time in costs.local(plan.local).values()]
    rounds = [bucket.round for bucket in plan.buckets]
    hidden = hidden_rounds(overlap, plan.buffer_sets, plan.rounds, ordered_rounds(plan.buckets, overlap))
    clock = run_clock(_Recorder(times, ranks), rounds, local, plan.buffer_sets, hidden)
    return sorted(clock.spans, key=lambda span: (span.start, span.rank))


class _Recorder(Clock):
    def __init__(self, times: Sequence[BucketTimes], ranks: Sequence[int]) -> None:
        super().__init__(times, len(ranks))
        self._ranks, self.spans = ranks, list[Span]()

    def gather(self, bucket: int, *, travels: bool) -> None:
        times = self._times[bucket]
        starts = [self.now[index] for index in times.group]
        super().gather(bucket, travels=travels)
        stops = [start + seconds for start, seconds in zip(starts, times.pack, strict=True)]
        self._add("advance", bucket, times.group, starts, stops)
        if travels:
            self._add_links("gather", bucket, times.phases[0])

    def stay(self, local: Sequence[float]) -> None:
        starts = list(self.now)
        super().stay(local)
        self._add("orthogonalize", LOCAL, range(len(starts)), starts, self.now)

    def orthogonalize(self, bucket: int) -> None:
        times = self._times[bucket]
        super().orthogonalize(bucket)
        stops = [self.now[index] for index in times.group]
        durations = (copies + owned.seconds for copies, owned in zip(times.copies, times.owned, strict=True))
        starts = [stop - seconds for stop, seconds in zip(stops, durations, strict=True)]
        self._add("orthogonalize", bucket, times.group, starts, stops)
        if len(times.phases) > 1:
            self._add_links("send_back", bucket, times.phases[1])

    def apply(self, bucket: int, *, late: bool) -> None:
        times = self._times[bucket]
        super().apply(bucket, late=late)
        ends = self.behind if late else self.now
        stops = [ends[index] for index in times.group]
        starts = [stop - seconds for stop, seconds in zip(stops, times.apply, strict=True)]
        self._add("apply", bucket, times.group, starts, stops)

    def _add_links(self, stage: str, bucket: int, phase: Sequence[float]) -> None:
        if any(phase):
            stops = [self._wires[index] for index in self._times[bucket].group]
            starts = [stop - seconds for stop, seconds in zip(stops, phase, strict=True)]
            self._add(stage, bucket, self._times[bucket].group, starts, stops)

    def _add(
        self, stage: str, bucket: int, group: Iterable[int], starts: Sequence[float], stops: Sequence[float]
    ) -> None:
        for index, start, stop in zip(group, starts, stops, strict=True):
            if stop > start:
                self.spans.append(Span(self._ranks[index], stage, bucket, start, stop))
