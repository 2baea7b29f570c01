"""Search for the fastest plan on a machine, within a price for memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, groupby, pairwise

from ..engine.layout.intervals import Pieces, Ranks
from ..engine.layout.types import Bucket
from ..engine.planning import Groups, OwnerOf, Task, Tasks, buckets_of, in_order
from ..engine.program.all_to_all import Pattern
from ..engine.program.phases import late_rounds
from ..options import MuonOptions, OptionError
from .owners import STRATEGIES, across_nodes, among
from .timeline import Clock, ordered_rounds
from .walk import Costs, PlanCost


def rounds(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Tasks in at most `count` rounds of consecutive matrices."""
    # A single round would leave every rank idle until the gather and again until the return, with buffers for all
    # matrices. Rounds are global, because groups with common ranks must launch collectives in a common order.
    total, seen = sum(task.bytes for task in tasks), 0
    result: list[list[Task]] = [[] for _ in range(count)]
    for task in sorted(tasks, key=lambda task: (task.matrix, task.group)):
        result[count * (2 * seen + task.bytes) // (2 * total)].append(task)
        seen += task.bytes
    return [round_tasks for round_tasks in result if round_tasks]


class Order(Enum):
    """The order of a rank's matrices, and where they are cut into rounds.

    Small matrices cost least in the first gather and the last return, because no computation hides these.
    """

    PEAKED = "small matrices first and last, and all ranks end a round at about the same time"
    COUNTED = "small matrices first and last, and about as many of a group in each round"
    ASCENDING = "small matrices first, and all ranks end a round at about the same time"
    DESCENDING = "small matrices last, and all ranks end a round at about the same time"
    MODEL = "consecutive matrices, in the order of a pass of the model"


def cut_into_rounds(
    tasks: Sequence[Task], groups: Groups, owners: OwnerOf, count: int, order: Order
) -> list[list[Task]]:
    """At most `count` rounds: each rank has a queue of matrices to orthogonalize, cut into rounds."""
    # A round ends at the slowest owner.
    share = [0.0] * len(groups)
    for task in tasks:
        share[task.group] += task.bytes / len(groups[task.group])
    most, sign = max(share, default=0.0), -1 if order is Order.DESCENDING else 1
    by_owner: dict[int, list[Task]] = {}
    # Groups with few bytes come first, in a single round, because of each call's latency.
    for task in sorted(tasks, key=lambda t: (share[t.group], t.group, sign * t.bytes, t.matrix)):
        by_owner.setdefault(owners[task.matrix, task.group], []).append(task)
    queues = list(by_owner.values())
    if order in (Order.PEAKED, Order.COUNTED):
        queues = [_peaked(queue, share, most) for queue in queues]
    result: list[list[Task]] = [[] for _ in range(count)]
    middles = () if order is Order.COUNTED else _typical_times(queues, count)
    for queue in queues:
        if order is not Order.COUNTED:
            for task, end in zip(queue, accumulate(task.flops for task in queue), strict=True):
                result[bisect_left(middles, end)].append(task)
            continue
        for group, group_tasks in groupby(queue, key=lambda task: task.group):
            parts, mine = max(1, round(count * share[group] / most)), list(group_tasks)
            for index, task in enumerate(mine):
                result[parts * (2 * index + 1) // (2 * len(mine))].append(task)
    return [round_tasks for round_tasks in result if round_tasks]


def _peaked(queue: Sequence[Task], share: Sequence[float], most: float) -> list[Task]:
    """The queue with small matrices first and last within the groups with most bytes."""
    start = next((index for index, task in enumerate(queue) if share[task.group] == most), len(queue))
    last = queue[start:]
    return [*queue[:start], *last[::2], *reversed(last[1::2])]


def _typical_times(queues: Iterable[Sequence[Task]], count: int) -> list[float]:
    """Where to cut queues: the FLOPs in the middle between the ends of two rounds.

    Measured on the queue that most ranks have.
    """
    queue_counts = Counter(tuple(task.flops for task in queue) for queue in queues)
    typical = max(queue_counts, key=lambda flops: (queue_counts[flops], sum(flops), flops), default=())
    before, ends = 0, dict[int, int]()
    for flops in typical:
        number = count * (2 * before + flops) // max(1, 2 * sum(typical))
        before += flops
        ends[min(number, count - 1)] = before
    return [(low + high) / 2 for low, high in pairwise(sorted(ends.values()))]


def in_model_order(
    rounds: Sequence[Sequence[Task]], owners: OwnerOf, pieces: Pieces, eligible: Mapping[int, Ranks]
) -> tuple[list[list[Task]], OwnerOf]:
    """The same rounds, nearly in order: tasks of equal cost change rounds and owners.

    `eligible`: the possible owners of a matrix, if fewer than the group.
    """

    def kind(task: Task) -> Hashable:
        return task.group, pieces.kinds[task.matrix], task.flops, eligible.get(task.matrix)

    # A forward waits for a round at the first of its parameters.
    # Layers are equal, so rounds balanced over ranks can also be in the model's order, kind by kind.
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for number, tasks in enumerate(rounds):
        for place, task in enumerate(tasks):
            places.setdefault(kind(task), []).append((number, place))
    exchanged, owned = [list(tasks) for tasks in rounds], dict(owners)
    for positions in places.values():
        before = [rounds[number][place] for number, place in positions]
        after = sorted(before, key=lambda task: task.matrix)
        for (number, place), old, new in zip(positions, before, after, strict=True):
            exchanged[number][place] = new
            owned[new.matrix, new.group] = owners[old.matrix, old.group]
    return exchanged, owned


FREE_BYTES = 2**30
"""Buffers and workspace without a price."""
WORTH_OF_GIB = 0.03
"""Share of the step's time to save per GiB beyond FREE_BYTES."""
MORE_BYTES = 2 * 2**30
"""Memory with a higher price beyond; the plan then notes the reason."""
WORTH_OF_MORE = 0.1
"""Share of the step's time to save per GiB beyond MORE_BYTES."""
NEAR_LIMIT = 1.01
"""The search stops at this factor of the busiest rank's compute time."""
SHORT_SECONDS = 1e-4
"""The search stops at waits this short."""
PAYS = 1.1
"""Rounds are doubled while the price is within this factor of the best."""
TURNS, FORWARD_TURNS = 2, 16
"""Most rounds per matrix of the busiest owner. Forward waits for the first round, and small rounds are short."""
BUFFER_SETS = (3, 4)
"""Buffer sets to overlap gather, compute and return; the fourth gathers earlier."""
FEWER_SETS = (1, 2)
"""Further numbers of buffer sets, if `buffer_gib` asks to save memory."""
MOST_TURNS = 200_000
"""Most simulated turns of single ranks."""


@dataclass(frozen=True)
class Problem:
    """Matrices to assign to owners, and costs to judge a plan.

    `eligible`: possible owners of a matrix, if fewer than the group.
    """

    options: MuonOptions
    pattern: Pattern
    costs: Costs
    given: Tasks
    eligible: Mapping[int, Ranks]


@dataclass(frozen=True)
class CandidatePlan:
    """Simulated buckets, and notes for the user.

    `seconds`: of a step. `bytes`: most buffers and workspace on a rank. `busiest`: most compute seconds of a rank.
    """

    buckets: tuple[Bucket, ...]
    buffer_sets: int
    seconds: float
    buffer_bytes: int
    bytes: int
    busiest: float
    reason: str = ""

    @property
    def price(self) -> float:
        priced, more = max(0, self.bytes - FREE_BYTES), max(0, self.bytes - MORE_BYTES)
        return self.seconds * (1 + (WORTH_OF_GIB * (priced - more) + WORTH_OF_MORE * more) / 2**30)


@dataclass(frozen=True)
class Strategy:
    """One way to distribute matrices over at most `rounds` rounds. `owners`: index into STRATEGIES."""

    rounds: int
    order: Order
    owners: int = 0


def fastest_plan(problem: Problem) -> CandidatePlan:
    """The best candidate. Raises OptionError if `buffer_gib` is too small for all."""
    search = _Search(problem)
    # Hidden communication may save less than uneven rounds cost.
    if problem.options.overlap != "none":
        search.run((Order.MODEL,))
    search.run((Order.COUNTED, Order.PEAKED, Order.ASCENDING, Order.DESCENDING))
    return search.chosen()


class _Search:
    # All ranks search independently and must find the same plan: end by simulated turns, never by a clock.

    def __init__(self, problem: Problem) -> None:
        self._problem, self._overlap = problem, problem.options.overlap
        self._tasks, self._groups = problem.given.tasks, problem.given.groups
        self._local = problem.costs.local(problem.given.local)
        self._candidates: list[CandidatePlan] = []
        self._simulated: dict[Strategy, CandidatePlan] = {}
        self._owners: dict[int, OwnerOf] = {}
        self._left = MOST_TURNS
        self._ending = ""

    def run(self, orders: Sequence[Order]) -> None:
        """Double the rounds until more rounds do not pay, then improve the best strategy field by field."""
        self._left = MOST_TURNS
        best, before = self._double(orders[0]), None
        strategies = range(len(STRATEGIES) if self._problem.pattern.has_owners else 1)
        # All combinations would take ten times as long.
        while best != before:
            before = best
            for owners in strategies:
                best = self._better(best, replace(best, owners=owners))
            for order in orders if best.rounds > 1 else ():
                best = self._better(best, replace(best, order=order))
            settled = None
            while best != settled:
                settled = best
                for count in (best.rounds - 1, best.rounds + 1, 3 * best.rounds // 4, 3 * best.rounds // 2):
                    if 1 <= count <= self._most_rounds():
                        best = self._better(best, replace(best, rounds=count))

    def _double(self, order: Order) -> Strategy:
        rank_bytes = 2 * sum(task.bytes for task in self._tasks) / max(1, len(self._local))
        most = self._most_rounds()
        best = strategy = Strategy(max(1, min(most, int(rank_bytes / (2 * FREE_BYTES)))), order)
        left, before = self._left, math.inf
        while (candidate := self._simulate(strategy)) is not None:
            best = self._better(best, strategy)
            # In large worlds, keep turns for other strategies, unless the last doubling paid much.
            next_turns, pays = 2 * (left - self._left), PAYS * candidate.price <= before
            ends = next_turns > self._left or (next_turns > self._left / 2 and not pays)
            ends = ends or candidate.price > PAYS * self._simulated[best].price
            if strategy.rounds == most or (ends and self._fits(candidate)):
                break
            left, before = self._left, candidate.price
            strategy = replace(strategy, rounds=min(2 * strategy.rounds, most))
        return best

    def _better(self, best: Strategy, other: Strategy) -> Strategy:
        """The strategy with the better candidate; `best` if the search has ended."""
        candidate = self._simulate(other)
        return other if candidate and self._worth(candidate) < self._worth(self._simulated[best]) else best

    def _most_rounds(self) -> int:
        most, owners = max(1, len(self._tasks)), self._assigned(0)
        turns = FORWARD_TURNS if self._overlap == "forward" else TURNS
        return most if not owners else min(turns * max(Counter(owners.values()).values()), most)

    def _assigned(self, number: int) -> OwnerOf | None:
        # On demand: for tens of thousands of experts an assignment takes as long as a candidate.
        problem = self._problem
        if not problem.pattern.has_owners:
            return None
        if number not in self._owners:
            assign, ranks_per_node = STRATEGIES[number], problem.costs.pieces.ranks_per_node
            assign = across_nodes(assign, ranks_per_node) if problem.pattern.knows_nodes else assign
            self._owners[number] = among(assign, self._tasks, self._groups, problem.given.load, problem.eligible)
        return self._owners[number]

    def _fits(self, candidate: CandidatePlan) -> bool:
        limit = self._problem.options.buffer_bytes
        return limit is None or candidate.buffer_bytes <= limit

    def _worth(self, candidate: CandidatePlan) -> tuple[bool, float, int]:
        fits = self._fits(candidate)
        return not fits, candidate.price if fits else candidate.buffer_bytes, candidate.bytes

    def _best(self) -> CandidatePlan:
        return min(self._candidates, key=self._worth)

    def _ended(self) -> bool:
        if not self._candidates:
            return False
        best = self._best()
        if self._fits(best) and best.price <= max(NEAR_LIMIT * best.busiest, best.busiest + SHORT_SECONDS):
            return True
        if self._left <= 0:
            self._ending = f"the search for a faster plan stopped after {MOST_TURNS:,} simulated turns of single ranks"
        return self._left <= 0

    def _simulate(self, strategy: Strategy) -> CandidatePlan | None:
        """None if the search has ended."""
        if strategy not in self._simulated:
            if self._ended():
                return None
            owners = self._assigned(strategy.owners)
            same = next((number for number in range(strategy.owners) if owners == self._assigned(number)), None)
            if same is not None:
                return self._simulate(replace(strategy, owners=same))
            if owners is None or strategy.order is Order.MODEL:
                grouped = rounds(self._tasks, strategy.rounds)
            else:
                grouped = cut_into_rounds(self._tasks, self._groups, owners, strategy.rounds, strategy.order)
                if self._overlap != "none":
                    pieces, eligible = self._problem.costs.pieces, self._problem.eligible
                    grouped, owners = in_model_order(grouped, owners, pieces, eligible)
            self._simulated[strategy] = self._add(grouped, owners)
        return self._simulated[strategy]

    def _add(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> CandidatePlan:
        """The best candidate over all numbers of buffer sets."""
        problem, costs = self._problem, self._problem.costs
        buckets = buckets_of(problem.pattern.name, grouped, owners, self._groups, costs.pieces, costs.works)
        cost, ordered = PlanCost(buckets, self._local, costs), ordered_rounds(buckets, self._overlap)
        # A pass of the model can hide every round with a buffer set.
        most = (len(grouped),) if ordered else ()
        fewer = () if problem.options.buffer_bytes is None else FEWER_SETS
        added = []
        for buffer_sets in {min(sets, max(1, len(grouped))): None for sets in (*BUFFER_SETS, *most, *fewer)}:
            self._left -= 3 * sum(len(bucket.group) for bucket in buckets)
            hidden = min(ordered, len(late_rounds(buffer_sets, len(grouped))))
            seconds, memory = Clock(cost, buffer_sets, hidden).end, cost.step_bytes(buffer_sets)
            buffers = max((rank.buffers for rank in memory), default=0)
            peak = max((rank.peak for rank in memory), default=0)
            added.append(CandidatePlan(buckets, buffer_sets, seconds, buffers, peak, cost.busiest()))
        self._candidates += added
        return min(added, key=self._worth)

    def chosen(self) -> CandidatePlan:
        """The best candidate, with more and more rounds of consecutive matrices until `buffer_gib` suffices."""
        count, best = 1, self._best()
        while not self._fits(best) and count < 2 * len(self._tasks):
            self._add(rounds(self._tasks, min(count, len(self._tasks))), self._assigned(0))
            count, best = 2 * count, self._best()
        if not self._fits(best):
            raise OptionError(
                "buffer_gib",
                f"= {self._problem.options.buffer_gib:.3g} is too small: these matrices take at least "
                f"{best.buffer_bytes / 2**30:.3g} GiB of buffers; raise it or use more ranks",
            )
        reason = "; ".join(filter(None, (self._ending, self._memory_of(best))))
        pieces, eligible = self._problem.costs.pieces, self._problem.eligible
        return replace(
            best, buckets=tuple(in_order(bucket, pieces, eligible) for bucket in best.buckets), reason=reason
        )

    def _memory_of(self, best: CandidatePlan) -> str:
        if best.bytes <= MORE_BYTES:
            return ""
        within = [candidate for candidate in self._candidates if candidate.bytes <= MORE_BYTES]
        other = min(within, key=lambda d: d.seconds) if within else min(self._candidates, key=lambda d: d.bytes)
        return (
            f"{best.bytes / 2**30:.1f} GiB of buffers and workspace, since with {other.bytes / 2**30:.1f} GiB a step "
            f"would take {other.seconds / best.seconds:.2f} x as long"
        )
