"""A plan played on a machine: when each rank computes, sends and waits, turn by turn as the executor runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from ...options import Overlap
from ..exchange.pattern import BucketTotals, Flow
from ..terms.layout import Geometries
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces
from ..terms.schedule import NOTHING, Act, Hidden, hidden_rounds, ordered_rounds, schedule
from ..terms.types import Plan
from .times import BucketTimes, Costs, OwnerTime, bucket_times
from .totals import Totals


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank in a step: Newton-Schulz, passes over memory, waits for collectives, and its busiest link.

    What is gathered in the backward before, or returned and applied in the forward behind, is not of the step. `host`
    are the seconds in which its host launches all of it.
    """

    rank: int
    orthogonalize: float
    passes: float
    waits: float
    link: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """When the rank is done, if its host is ahead."""
        return self.orthogonalize + self.passes + self.waits


@dataclass(frozen=True)
class Timeline:
    """A step in seconds.

    Attributes:
        machine: its name.
        overlap: which of the model's passes hides a part of the exchange.
        ranks: what each rank does.
        least: seconds of Newton-Schulz that no plan can be below: the mean over ranks, or the largest matrix.
        exposed: seconds by which the step would be shorter if links took no time.
        hidden: seconds of gathers in the backward before, on the rank that has most of them; or from the end of the
            step until the forward behind it has all results. None if all are in the step.
        tail: seconds between the last Newton-Schulz of any rank and the end of the step: the last way back, and apply.
            Nothing that waits for a return later, such as the layers of the next forward, can save more: the rank that
            orthogonalizes last has all of its forward before it.
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
        """The rank that is done last."""
        return max(self.ranks, key=lambda rank: (rank.seconds, -rank.rank))

    @property
    def link(self) -> float:
        """Seconds of the busiest link of all ranks."""
        return max(rank.link for rank in self.ranks)

    @property
    def host(self) -> float:
        """Seconds of the busiest host of all ranks: the step takes no less, unless its host is ahead of the device."""
        return max(rank.host for rank in self.ranks)


def timeline(plan: Plan, machine: MachineRates, *, overlap: Overlap = "none") -> Timeline:
    """Play a plan. Pure and deterministic; takes time by ranks, matrices and collectives, not by pieces.

    With `overlap` the first gathers travel in the backward before the step, or the last results in the forward behind
    it, which is taken to be long enough.
    """
    pieces = Pieces(plan.matrices, Geometries(plan.parameters), machine.ranks_per_node)
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine, plan.passes)
    ranks = pieces.ranks()
    place = {rank: index for index, rank in enumerate(ranks)}
    totals = Totals(plan.buckets, pieces).of_buckets
    times = [bucket_times(b, t, costs, place) for b, t in zip(plan.buckets, totals, strict=True)]
    local_times = costs.local(plan.local)
    newton, passes = (
        [one.owned.seconds for one in local_times.values()],
        [one.passes for one in local_times.values()],
    )
    local = [one.seconds for one in local_times.values()]
    rounds = [bucket.round for bucket in plan.buckets]
    hidden = hidden_rounds(overlap, plan.buffer_sets, plan.rounds, ordered_rounds(plan.buckets, overlap))
    clock = _run_clock(times, rounds, local, plan.buffer_sets, hidden)
    ends = clock.now
    # What is gathered before takes no time in either; what is applied later is left out of both.
    free = simulate(
        [_with_free_links(one) for one in times], rounds, local, plan.buffer_sets, Hidden(returns=hidden.returns)
    )
    before = [number < hidden.gathers for number in rounds]
    behind = [number >= plan.rounds - hidden.returns for number in rounds]
    for one, late in zip(times, behind, strict=True):
        for index, mine, pack, copies, apply in zip(one.group, one.owned, one.pack, one.copies, one.apply, strict=True):
            newton[index] += mine.seconds
            passes[index] += pack + copies + (0.0 if late else apply)
    links = _links(totals, before, behind, ranks, plan.wire_bytes, machine)
    hosts = _hosts(totals, {rank: one.owned for rank, one in local_times.items()}, costs)
    found = zip(ranks, newton, passes, ends, links, hosts, strict=True)
    outside = {
        "none": None,
        "backward": _gathered(compress(times, before), len(ranks)),
        "forward": max(0.0, max(clock.behind, default=0.0) - max(ends, default=0.0)),
    }
    return Timeline(
        machine.name,
        overlap,
        # Waits are what is left, which a sum of many seconds may round below zero.
        tuple(RankTime(rank, ns, moved, max(0.0, end - ns - moved), *rest) for rank, ns, moved, end, *rest in found),
        _least(plan, costs, len(ranks)),
        max(ends, default=0.0) - max(free, default=0.0),
        outside[overlap],
        max(ends, default=0.0) - clock.computed,
    )


def simulate(
    times: Sequence[BucketTimes],
    rounds: Sequence[int],
    local: Sequence[float],
    buffer_sets: int,
    hidden: Hidden = NOTHING,
) -> list[float]:
    """When each rank is done but for what is `hidden`. `rounds` are of the buckets, `local` the seconds of what each
    rank stores whole."""
    return _run_clock(times, rounds, local, buffer_sets, hidden).now


def _run_clock(
    times: Sequence[BucketTimes], rounds: Sequence[int], local: Sequence[float], buffer_sets: int, hidden: Hidden
) -> _Clock:
    count = max(rounds, default=-1) + 1
    by_round: list[list[int]] = [[] for _ in range(count)]
    for index, number in enumerate(rounds):
        by_round[number].append(index)
    clock = _Clock(times, len(local))
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


class _Clock:
    """The time of every rank's computation, and of its links, as a step goes on."""

    # The host runs ahead: it enqueues the turns of a rank without waiting for them. A rank's computation goes on when
    # the collective that it waits for is over, which is when its last rank is done: each rank sends to the slowest one
    # too. Collectives of one group follow each other, since a communicator has one stream. Those of several groups run
    # side by side but share the wires, which a rank's own part alone keeps busy.

    def __init__(self, times: Sequence[BucketTimes], ranks: int) -> None:
        self._times = times
        self.now = [0.0] * ranks
        self.computed = 0.0
        self.behind = [0.0] * ranks
        self._wires = [0.0] * ranks
        self._streams: dict[tuple[int, ...], float] = {}
        self._over = [0.0] * len(times)

    def gather(self, bucket: int, *, travels: bool) -> None:
        one = self._times[bucket]
        for index, taken in zip(one.group, one.pack, strict=True):
            self.now[index] += taken
        if travels:
            self._launch(bucket, one.phases[0])

    def stay(self, local: Sequence[float]) -> None:
        # What is stored whole is applied where it is orthogonalized, and has no way back.
        self.now = [now + taken for now, taken in zip(self.now, local, strict=True)]
        self.computed = max(self.now, default=0.0)

    def orthogonalize(self, bucket: int) -> None:
        one, now, over = self._times[bucket], self.now, self._over[bucket]
        for index in one.group:
            now[index] = max(now[index], over)
        for team, seconds in one.teams:
            # The slices of a matrix begin when the last of their owners is there, and end together. They come first,
            # see `batches`; their seconds are among those that are added below.
            start = max(now[index] for index in team)
            for index in team:
                now[index] = start + seconds
        for team, seconds in one.teams:
            for index in team:
                now[index] -= seconds
        for index, copies, owned in zip(one.group, one.copies, one.owned, strict=True):
            now[index] += copies + owned.seconds
        self.computed = max(self.computed, *(now[index] for index in one.group))
        if len(one.phases) > 1:
            self._launch(bucket, one.phases[1])

    def apply(self, bucket: int, *, late: bool) -> None:
        one, now, over = self._times[bucket], self.now, self._over[bucket]
        for index, taken in zip(one.group, one.apply, strict=True):
            if late:
                # One after the other, on the stream of updates.
                self.behind[index] = max(self.behind[index], now[index], over) + taken
            else:
                now[index] = max(now[index], over) + taken

    def _launch(self, bucket: int, phase: Sequence[float]) -> None:
        # Where whole copies have nothing to gather no rank waits for another.
        if not any(phase):
            return
        one, now, wires = self._times[bucket], self.now, self._wires
        group = one.group
        start = max(self._streams.get(group, 0.0), max(max(now[index], wires[index]) for index in group))
        for index, taken in zip(group, phase, strict=True):
            wires[index] = start + taken
        self._streams[group] = self._over[bucket] = start + max(phase) + one.latency


def _with_free_links(one: BucketTimes) -> BucketTimes:
    """A bucket whose collectives take no time. Its ranks still wait for the last of them to begin."""
    # Not zero: what sends nothing is no collective, and nobody waits there.
    phases = tuple(tuple(seconds * 1e-30 for seconds in phase) for phase in one.phases)
    return replace(one, phases=phases, latency=0.0)


def _gathered(times: Iterable[BucketTimes], ranks: int) -> float:
    """Seconds of the gathers of some buckets, on the rank that has most of them."""
    taken = [0.0] * ranks
    for one in times:
        for index in one.group if any(one.phases[0]) else ():
            taken[index] += max(one.phases[0]) + one.latency
    return max(taken, default=0.0)


def _links(
    totals: Iterable[Mapping[int, BucketTotals]],
    gathered: Iterable[bool],
    late: Iterable[bool],
    ranks: Sequence[int],
    wire_bytes: int,
    machine: MachineRates,
) -> list[float]:
    """Seconds that the busiest link of each rank is at work in a step, to which some buckets come gathered, and whose
    end others return after."""
    sums = {rank: [0] * len(Flow._fields) for rank in ranks}
    for bucket, before, behind in zip(totals, gathered, late, strict=True):
        for rank, found in bucket.items():
            for flow in found.phases[before : 1 if behind else None]:
                sums[rank] = [total + more for total, more in zip(sums[rank], flow, strict=True)]
    return [Flow(*sums[rank]).seconds(wire_bytes, machine) for rank in ranks]


def _hosts(totals: Iterable[Mapping[int, BucketTotals]], local: Mapping[int, OwnerTime], costs: Costs) -> list[float]:
    """Seconds in which the host of each rank launches the step."""
    found = {rank: [one.matrices, one.batches, 0] for rank, one in local.items()}
    for bucket in totals:
        for rank, one in bucket.items():
            owned = costs.owned(one.owned)
            mine = found[rank]
            mine[0] += one.pieces
            mine[1] += owned.batches
            mine[2] += one.collectives + owned.team_calls
    return [costs.machine.host_seconds(*mine) for mine in found.values()]


def _least(plan: Plan, costs: Costs, ranks: int) -> float:
    """The mean over ranks, or the largest matrix."""
    kinds = Counter((matrix.work, min(matrix.rows, matrix.cols)) for matrix in plan.matrices)
    examples = {(matrix.work, min(matrix.rows, matrix.cols)): matrix for matrix in plan.matrices}
    alone = {kind: costs.alone(matrix) for kind, matrix in examples.items()}
    mean = sum(count * alone[kind] for kind, count in kinds.items()) / max(1, ranks)
    return max([mean, *alone.values()])
