"""Simulation of a step on a machine: the compute, communication and wait times of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple, TypeVar

from ...options import Overlap
from ..exchange.pattern import BucketTotals, LinkTraffic
from ..terms.layout import Geometries
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces
from ..terms.schedule import NOTHING, Act, Hidden, hidden_rounds, ordered_rounds, schedule
from ..terms.types import Plan
from .times import BucketTimes, Costs, LocalTime, bucket_times
from .totals import Totals


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank in a step, without communication hidden in the model's passes. `host`: to launch the step."""

    rank: int
    orthogonalize: float
    passes: float
    waits: float
    link: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.orthogonalize + self.passes + self.waits


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step.

    Attributes:
        least: lower bound by Newton-Schulz: the mean over ranks, or the largest matrix.
        exposed: saved if communication took no time.
        hidden: most seconds of a rank's gathers in the previous backward ("backward"), or from the end of the step
            until the next forward has all results ("forward").
        tail: from the last Newton-Schulz of any rank to the end: upper bound of the gain by returns in forward.
    """

    machine: str
    overlap: Overlap
    ranks: tuple[RankTime, ...]
    least: float
    exposed: float
    hidden: float | None
    tail: float

    @property
    def last(self) -> RankTime:
        return max(self.ranks, key=lambda rank: (rank.seconds, -rank.rank))

    @property
    def link(self) -> float:
        return max(rank.link for rank in self.ranks)

    @property
    def host(self) -> float:
        return max(rank.host for rank in self.ranks)


def timeline(plan: Plan, machine: MachineRates, *, overlap: Overlap = "none") -> Timeline:
    """Simulate a plan. A pass with `overlap` is assumed to hide all of its gathers or returns."""
    m = _modelled(plan, machine, overlap)
    costs, totals, times, hidden, local = m.costs, m.totals, m.times, m.hidden, list(m.local.values())
    newton, passes = [time.owned.seconds for time in local], [time.passes for time in local]
    clock = m.run(plan, Clock(times, len(local)))
    ends = clock.now
    # Hidden gathers take no time in either run; late applies are left out of both.
    unlinked = m._replace(times=[_with_free_links(bucket) for bucket in times], hidden=Hidden(returns=hidden.returns))
    free = unlinked.run(plan, Clock(unlinked.times, len(local))).now
    before = [bucket.round < hidden.gathers for bucket in plan.buckets]
    behind = [bucket.round >= plan.rounds - hidden.returns for bucket in plan.buckets]
    for bucket, late in zip(times, behind, strict=True):
        for index, owned, pack, copies, apply in zip(
            bucket.group, bucket.owned, bucket.pack, bucket.copies, bucket.apply, strict=True
        ):
            newton[index] += owned.seconds
            passes[index] += pack + copies + (0.0 if late else apply)
    links = _links(totals, before, behind, list(m.local), plan.wire_bytes, machine)
    hosts = _hosts(totals, m.local, costs)
    columns = zip(m.local, newton, passes, ends, links, hosts, strict=True)
    hidden_seconds = {
        "none": None,
        "backward": _gathered(compress(times, before), len(local)),
        "forward": max(0.0, max(clock.behind, default=0.0) - max(ends, default=0.0)),
    }
    return Timeline(
        machine.name,
        overlap,
        # Rounding of the sums could make waits negative.
        tuple(RankTime(rank, ns, moved, max(0.0, end - ns - moved), *rest) for rank, ns, moved, end, *rest in columns),
        _least(plan, costs, len(local)),
        max(ends, default=0.0) - max(free, default=0.0),
        hidden_seconds[overlap],
        max(ends, default=0.0) - clock.computed,
    )


C = TypeVar("C", bound="Clock")


class _Modelled(NamedTuple):
    costs: Costs
    totals: list[dict[int, BucketTotals]]
    times: list[BucketTimes]
    local: Mapping[int, LocalTime]
    hidden: Hidden

    def run(self, plan: Plan, clock: C) -> C:
        rounds, local = [bucket.round for bucket in plan.buckets], [time.seconds for time in self.local.values()]
        return run_clock(clock, rounds, local, plan.buffer_sets, self.hidden)


def _modelled(plan: Plan, machine: MachineRates, overlap: Overlap) -> _Modelled:
    pieces = Pieces(plan.matrices, Geometries(plan.parameters), machine.ranks_per_node)
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine, plan.passes)
    place = {rank: index for index, rank in enumerate(pieces.ranks())}
    totals = Totals(plan.buckets, pieces).of_buckets
    times = [bucket_times(b, t, costs, place) for b, t in zip(plan.buckets, totals, strict=True)]
    hidden = hidden_rounds(overlap, plan.buffer_sets, plan.rounds, ordered_rounds(plan.buckets, overlap))
    return _Modelled(costs, totals, times, costs.local(plan.local), hidden)


def simulate(
    times: Sequence[BucketTimes],
    rounds: Sequence[int],
    local: Sequence[float],
    buffer_sets: int,
    hidden: Hidden = NOTHING,
) -> list[float]:
    """The end of each rank's step, without `hidden` rounds; `rounds` by bucket, `local` seconds by rank."""
    return run_clock(Clock(times, len(local)), rounds, local, buffer_sets, hidden).now


def run_clock(clock: C, rounds: Sequence[int], local: Sequence[float], buffer_sets: int, hidden: Hidden = NOTHING) -> C:
    """Play the turns of a step. Arguments as for `simulate`."""
    count = max(rounds, default=-1) + 1
    by_round: list[list[int]] = [[] for _ in range(count)]
    for index, number in enumerate(rounds):
        by_round[number].append(index)
    opening, turns = schedule(count, max(1, min(buffer_sets, count)))
    for _, number in opening:
        for bucket in by_round[number]:
            clock.gather(bucket, travels=number >= hidden.gathers)
    clock.stay(local)
    for act, number in turns:
        for bucket in by_round[number]:
            if act is Act.GATHER:
                clock.gather(bucket, travels=number >= hidden.gathers)
            elif act is Act.ORTHOGONALIZE:
                clock.orthogonalize(bucket)
            else:
                clock.apply(bucket, late=number >= count - hidden.returns)
    return clock


class Clock:
    """Clocks of every rank's compute stream and links during a step."""

    # Compute continues when the awaited collective ends on the slowest rank. Collectives of a group are serialized.
    # Collectives of different groups run concurrently but share a rank's links, occupied only by the rank's traffic.

    def __init__(self, times: Sequence[BucketTimes], ranks: int) -> None:
        self._times = times
        self.now = [0.0] * ranks
        self.computed = 0.0
        self.behind = [0.0] * ranks
        self._wires = [0.0] * ranks
        self._streams: dict[tuple[int, ...], float] = {}
        self._over = [0.0] * len(times)

    def gather(self, bucket: int, *, travels: bool) -> None:
        times = self._times[bucket]
        for index, seconds in zip(times.group, times.pack, strict=True):
            self.now[index] += seconds
        if travels:
            self._launch(bucket, times.phases[0])

    def stay(self, local: Sequence[float]) -> None:
        self.now = [now + seconds for now, seconds in zip(self.now, local, strict=True)]
        self.computed = max(self.now, default=0.0)

    def orthogonalize(self, bucket: int) -> None:
        times, now, over = self._times[bucket], self.now, self._over[bucket]
        for index in times.group:
            now[index] = max(now[index], over)
        for team, seconds in times.teams:
            # Slices of a matrix start at the last of their owners, and end together. `owned` below includes their
            # seconds.
            start = max(now[index] for index in team)
            for index in team:
                now[index] = start + seconds
        for team, seconds in times.teams:
            for index in team:
                now[index] -= seconds
        for index, copies, owned in zip(times.group, times.copies, times.owned, strict=True):
            now[index] += copies + owned.seconds
        self.computed = max(self.computed, *(now[index] for index in times.group))
        if len(times.phases) > 1:
            self._launch(bucket, times.phases[1])

    def apply(self, bucket: int, *, late: bool) -> None:
        times, now, over = self._times[bucket], self.now, self._over[bucket]
        for index, seconds in zip(times.group, times.apply, strict=True):
            if late:
                self.behind[index] = max(self.behind[index], now[index], over) + seconds
            else:
                now[index] = max(now[index], over) + seconds

    def _launch(self, bucket: int, phase: Sequence[float]) -> None:
        # No wait without traffic.
        if not any(phase):
            return
        times, now, wires = self._times[bucket], self.now, self._wires
        group = times.group
        start = max(self._streams.get(group, 0.0), max(max(now[index], wires[index]) for index in group))
        for index, seconds in zip(group, phase, strict=True):
            wires[index] = start + seconds
        self._streams[group] = self._over[bucket] = start + max(phase) + times.latency


def _with_free_links(times: BucketTimes) -> BucketTimes:
    # Use 1e-30, not 0: zero bytes would mean "no collective", and ranks would not synchronize.
    phases = tuple(tuple(seconds * 1e-30 for seconds in phase) for phase in times.phases)
    return replace(times, phases=phases, latency=0.0)


def _gathered(times: Iterable[BucketTimes], ranks: int) -> float:
    sums = [0.0] * ranks
    for bucket in times:
        for index in bucket.group if any(bucket.phases[0]) else ():
            sums[index] += max(bucket.phases[0]) + bucket.latency
    return max(sums, default=0.0)


def _links(
    totals: Iterable[Mapping[int, BucketTotals]],
    gathered: Iterable[bool],
    late: Iterable[bool],
    ranks: Sequence[int],
    wire_bytes: int,
    machine: MachineRates,
) -> list[float]:
    """Each rank's busiest link, without gathers of `gathered` and returns of `late` buckets."""
    sums = {rank: [0] * len(LinkTraffic._fields) for rank in ranks}
    for bucket, before, behind in zip(totals, gathered, late, strict=True):
        for rank, rank_totals in bucket.items():
            for flow in rank_totals.phases[before : 1 if behind else None]:
                sums[rank] = [total + more for total, more in zip(sums[rank], flow, strict=True)]
    return [LinkTraffic(*sums[rank]).seconds(wire_bytes, machine) for rank in ranks]


def _hosts(totals: Iterable[Mapping[int, BucketTotals]], local: Mapping[int, LocalTime], costs: Costs) -> list[float]:
    launches = {rank: [time.owned.matrices, time.owned.batches, 0] for rank, time in local.items()}
    for bucket in totals:
        for rank, rank_totals in bucket.items():
            owned, counts = costs.owned(rank_totals.owned), launches[rank]
            counts[0] += rank_totals.pieces
            counts[1] += owned.batches
            counts[2] += rank_totals.collectives + owned.team_calls
    return [costs.machine.host_seconds(*counts) for counts in launches.values()]


def _least(plan: Plan, costs: Costs, ranks: int) -> float:
    kinds = Counter((matrix.work, min(matrix.rows, matrix.cols)) for matrix in plan.matrices)
    examples = {(matrix.work, min(matrix.rows, matrix.cols)): matrix for matrix in plan.matrices}
    alone = {kind: costs.alone(matrix) for kind, matrix in examples.items()}
    mean = sum(count * alone[kind] for kind, count in kinds.items()) / max(1, ranks)
    return max([mean, *alone.values()])


STAGES = ("advance", "gather", "copy", "orthogonalize", "send_back", "apply")
LOCAL = -1
"""Bucket of local matrices."""


class StageSpan(NamedTuple):
    """A stage of a bucket on a rank, in seconds from the start of the step. Gathers and returns are on the links.

    `copy`: assembling matrices, and filling the return buffer.
    """

    rank: int
    stage: str
    bucket: int
    start: float
    stop: float


def spans(plan: Plan, machine: MachineRates, *, overlap: Overlap = "none") -> list[StageSpan]:
    """The spans of every rank in the modelled step, by start."""
    modelled = _modelled(plan, machine, overlap)
    recorder = modelled.run(plan, _Recorder(modelled.times, modelled.local))
    return sorted(recorder.spans, key=lambda span: (span.start, span.rank))


class _Recorder(Clock):
    def __init__(self, times: Sequence[BucketTimes], local: Mapping[int, LocalTime]) -> None:
        super().__init__(times, len(local))
        self._ranks, self._local, self.spans = list(local), list(local.values()), list[StageSpan]()

    def gather(self, bucket: int, *, travels: bool) -> None:
        times = self._times[bucket]
        starts = [self.now[index] for index in times.group]
        super().gather(bucket, travels=travels)
        stops = [start + seconds for start, seconds in zip(starts, times.pack, strict=True)]
        self._add("advance", bucket, times.group, starts, stops)
        if travels:
            self._add_links("gather", bucket, times.phases[0])

    def stay(self, local: Sequence[float]) -> None:
        ends = list(self.now)
        super().stay(local)
        for stage in ("advance", "orthogonalize", "apply"):
            durations = (t.owned.seconds if stage == "orthogonalize" else getattr(t, stage) for t in self._local)
            starts, ends = ends, [end + seconds for end, seconds in zip(ends, durations, strict=True)]
            self._add(stage, LOCAL, range(len(starts)), starts, ends)

    def orthogonalize(self, bucket: int) -> None:
        times = self._times[bucket]
        super().orthogonalize(bucket)
        stops = [self.now[index] for index in times.group]
        starts = [stop - owned.seconds for stop, owned in zip(stops, times.owned, strict=True)]
        copied = [start - copies for start, copies in zip(starts, times.copies, strict=True)]
        self._add("copy", bucket, times.group, copied, starts)
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
                self.spans.append(StageSpan(self._ranks[index], stage, bucket, start, stop))
