"""Simulation of a step on a machine: the compute, communication and wait times of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from operator import mul

from ..engine.layout.types import Bucket, Plan
from ..engine.layout.work import ElementwiseCost
from ..engine.program.phases import Act, Turn, late_rounds, schedule
from ..options import Overlap
from .machine import STEP_OPERATORS, MachineRates
from .walk import LOCAL, PlanCost, Share, link_seconds

NO_TIME = 1e-30
"""Share of the links' time in a simulation with free links. 0 would mean "no collective", and ranks would not wait."""

EARLY = 1 / 8
"""Returns of the first eighth of the model are not overlapped, because forward needs its weights first."""


def ordered_rounds(buckets: Iterable[Bucket], overlap: Overlap) -> int:
    """How many of the last rounds the next forward can hide, because they have no matrix of the EARLY share."""
    if overlap == "none":
        return 0
    least: dict[int, int] = {}
    most = 0
    for bucket in buckets:
        least[bucket.round] = min(least.get(bucket.round, bucket.matrices[0]), *bucket.matrices)
        most = max(most, *bucket.matrices)
    first = min(least.values(), default=0)
    early = first + EARLY * (most + 1 - first)
    return sum(1 for _ in takewhile(lambda number: least[number] >= early, sorted(least, reverse=True)))


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank in a step, without communication hidden in the model's passes.

    `host`: to launch the step, of `operators` operators.
    """

    rank: int
    orthogonalize: float
    passes: float
    waits: float
    link: float
    host: float = 0.0
    operators: int = 0

    @property
    def seconds(self) -> float:
        return self.orthogonalize + self.passes + self.waits


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step.

    Attributes:
        least: lower bound by Newton-Schulz: the mean over ranks, or the largest matrix.
        exposed: seconds that the step waits for communication.
        hidden: seconds from the end of the step until the next forward has all results. None without overlap.
        tail: seconds between the last Newton-Schulz and the end of the step. `overlap = "forward"` cannot save more.
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


def timeline(plan: Plan, machine: MachineRates, *, overlap: Overlap = "none", cost: PlanCost | None = None) -> Timeline:
    """Simulate a plan. A pass with `overlap` is assumed to hide all of its returns.

    `cost`: of the plan on the machine.
    """
    cost = PlanCost.from_plan(plan, machine) if cost is None else cost
    hidden = min(ordered_rounds(plan.buckets, overlap), len(late_rounds(plan.buffer_sets, plan.rounds)))
    clock = Clock(cost, plan.buffer_sets, hidden)
    shapes = len({(m.rows, m.cols) for m, ranks in zip(plan.matrices, plan.local, strict=True) if not ranks})
    # Late applies are left out of both runs.
    free = Clock(cost, plan.buffer_sets, hidden, links=NO_TIME)
    # A rank has a piece of each parameter, or several of a stack.
    entries = len(plan.parameters) * cost.costs.elementwise.traffic.lists
    time_of = cache(partial(_rank_time, cost, clock, shapes, entries))
    members, alone = zip(cost.ranks, cost.class_of, strict=True), Counter(map(cost.costs.alone, plan.matrices))
    after = max(0.0, max(clock.after_step, default=0.0) - clock.end)
    return Timeline(
        machine.name,
        overlap,
        tuple(replace(time_of(alike), rank=rank) for rank, alike in members),
        max([sum(map(mul, alone, alone.values())) / max(1, len(cost.ranks)), *alone]),
        clock.end - free.end,
        None if overlap == "none" else after,
        clock.end - clock.computed,
    )


class Clock:
    """Clocks of the compute stream and links of each class of ranks after a step, without the updates of the last
    `hidden` rounds. `links`: factor on their time.

    `now`: by class, the end of its last stage in the step. `computed`: end of the last Newton-Schulz.
    `after_step`: by class, the end of its last update in the next forward.
    """

    # Compute continues when the awaited collective ends on the slowest rank. Collectives of a group are serialized.
    # Collectives of different groups run concurrently but share a rank's links, occupied only by the rank's traffic.

    def __init__(self, cost: PlanCost, buffer_sets: int, hidden: int = 0, *, links: float = 1.0) -> None:
        self._cost, self.hidden, self._links = cost, hidden, links
        self.now, self.after_step, self._wires = ([0.0] * len(cost.by_class) for _ in range(3))
        self.computed = 0.0
        self._streams: dict[tuple[int, ...], float] = {}
        self._arrived = [0.0] * len(cost.buckets)
        opening, turns = schedule(cost.rounds, max(1, min(buffer_sets, cost.rounds)))
        by_round: list[list[int]] = [[] for _ in range(cost.rounds)]
        for index, bucket in enumerate(cost.buckets):
            by_round[bucket.round].append(index)
        acts = {Act.GATHER: self._gather, Act.ORTHOGONALIZE: self._orthogonalize, Act.APPLY: self._apply}

        def run(turns: Iterable[Turn]) -> None:
            for act, number in turns:
                for index in by_round[number]:
                    acts[act](index)

        run(opening)
        for alike, (share, *_) in enumerate(cost.by_class):
            self.now[alike] = share.pack + self.now[alike] + share.owned.seconds + share.apply
        self.computed = self.end
        run(turns)

    @property
    def end(self) -> float:
        return max(self.now, default=0.0)

    def _gather(self, index: int) -> None:
        shares = self._cost.buckets[index].shares
        for alike, share in shares.items():
            self.now[alike] += share.pack
        self._launch(index, [share.gather for share in shares.values()])

    def _orthogonalize(self, index: int) -> None:
        shares, now = self._cost.buckets[index].shares, self.now
        for alike, share in shares.items():
            now[alike] = max(now[alike], self._arrived[index]) + share.copies + share.owned.seconds
            self.computed = max(self.computed, now[alike])
        self._launch(index, [share.back for share in shares.values()])

    def _apply(self, index: int) -> None:
        bucket, arrived = self._cost.buckets[index], self._arrived[index]
        ends = self.after_step if bucket.round >= self._cost.rounds - self.hidden else self.now
        for alike, share in bucket.shares.items():
            ends[alike] = max(ends[alike], self.now[alike], arrived) + share.apply

    def _launch(self, index: int, seconds: Sequence[float]) -> None:
        # No wait without traffic.
        if not any(seconds):
            return
        bucket, now, wires = self._cost.buckets[index], self.now, self._wires
        classes = tuple(bucket.shares)
        free = max(max(now[alike], wires[alike]) for alike in classes)
        start = max(self._streams.get(classes, 0.0), free)
        for alike, mine in zip(classes, seconds, strict=True):
            wires[alike] = start + mine * self._links
        end = start + (max(seconds) + bucket.latency) * self._links
        self._streams[classes] = self._arrived[index] = end


def _rank_time(cost: PlanCost, clock: Clock, shapes: int, entries: int, alike: int) -> RankTime:
    """Of any rank of a class. `shapes`: of travelling matrices."""
    shares, first_late, costs = cost.by_class[alike], cost.rounds - clock.hidden, cost.costs
    newton = sum(share.owned.seconds for share in shares)
    passes = sum(share.passes - (share.apply if share.round >= first_late else 0.0) for share in shares)
    # Rounding of the sums could make waits negative.
    waits = max(0.0, clock.now[alike] - newton - passes)
    # Of the rank's busiest link, without hidden returns.
    traffic = [
        (phase, share.wire_bytes)
        for share in shares
        for phase in share.totals.phases[: share.totals.hops if share.round >= first_late else None]
    ]
    operators = STEP_OPERATORS + sum(_operators(share, costs.elementwise, shapes) for share in shares)
    collectives = sum(share.totals.collectives for share in shares)
    host = costs.machine.host_seconds(operators, entries, collectives)
    return RankTime(0, newton, passes, waits, link_seconds(traffic, costs.machine), host, operators)


def _operators(share: Share, passes: ElementwiseCost, shapes: int) -> int:
    """Operators of a share. `shapes`: of travelling matrices; a call updates matrices of one shape."""
    if not share.totals.stored:
        return share.owned.operators
    local = share.round == LOCAL
    buckets, elements = (share.owned.batches, share.owned.elements) if local else (1, share.totals.stored)
    if passes.traffic.fused:
        return share.owned.operators + 2 * buckets
    advance = max(buckets, -(-elements // passes.advance_elements)) * passes.traffic.advance_launches
    calls = max(buckets if local else shapes, -(-elements // passes.apply_elements))
    return share.owned.operators + advance + calls * passes.traffic.apply_launches
