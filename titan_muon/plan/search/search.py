"""Search for the fastest plan on a machine, within a price for memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ...options import OptionError, Overlap
from ..cost.memory import step_bytes
from ..cost.timeline import simulate
from ..cost.times import BucketTimes, bucket_times
from ..cost.totals import Totals
from ..terms.schedule import hidden_rounds, ordered_rounds
from ..terms.types import Bucket
from .model_order import in_model_order
from .owners import STRATEGIES, OwnerOf, Task, among
from .problem import Problem
from .rounds import Cut, Dealer, Order, rounds, together

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
TURNS: Mapping[Overlap, int] = {"none": 2, "backward": 2, "forward": 16}
"""Most rounds per matrix of the busiest owner. Forward waits for the first round, and small rounds are short."""
BUFFER_SETS = (3, 2, 4, 1)
"""3 buffer sets overlap gather, compute and return. 1-2 save memory, 4 absorb imbalance."""
MOST_TURNS = 400_000
"""Most simulated turns of single ranks."""


@dataclass(frozen=True)
class Simulation:
    """Simulated buckets.

    Attributes:
        seconds: step time.
        bytes: most buffers and workspace on a rank.
        busiest: compute seconds of the busiest rank.
        reason: notes for the user.
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
    """Ways to deal matrices to at most `rounds` rounds. `in_model_order` ignores `order` and `cut`."""

    rounds: int
    in_model_order: bool = False
    owners: int = 0  # Index into STRATEGIES.
    order: Order = Order.PEAKED
    cut: Cut = Cut.TIME


def fastest(problem: Problem) -> Simulation:
    """The best simulation. Raises OptionError if `buffer_bytes` is too small for all."""
    search = _Search(problem)
    # Hidden communication may save less than uneven rounds cost.
    for ordered in (True, False) if problem.options.overlap != "none" else (False,):
        search.run(ordered)
    search.run_until_it_fits()
    return search.chosen()


class _Search:
    # All ranks search independently and must find the same plan: end by simulated turns, never by a clock.

    def __init__(self, problem: Problem) -> None:
        self._problem, self._overlap = problem, problem.options.overlap
        self._place = {rank: index for index, rank in enumerate(problem.costs.pieces.ranks())}
        self._local = list(problem.costs.local(problem.local).values())
        self._dealer = Dealer(problem.tasks, problem.groups)
        self._simulations: list[Simulation] = []
        self._simulated: dict[Strategy, Simulation] = {}
        self._owners: dict[int, OwnerOf] = {}
        self._left = MOST_TURNS
        self._ending = ""

    def run(self, in_model_order: bool) -> None:
        """Double the rounds until more rounds do not pay, then improve the best strategy field by field."""
        self._left = MOST_TURNS
        rank_bytes = 2 * sum(task.bytes for task in self._problem.tasks) / max(1, len(self._place))
        first = max(1, min(self._most_rounds(), int(rank_bytes * max(BUFFER_SETS) / (8 * FREE_BYTES))))
        self._double(Strategy(first, in_model_order))
        best = None
        while self._simulated and best != (best := self._best_strategy(in_model_order)):
            # All combinations would take ten times as long.
            for neighbours in (self._other_orders, self._other_owners, self._other_rounds):
                for strategy in neighbours(self._best_strategy(in_model_order)):
                    self._simulate(strategy)

    def _double(self, strategy: Strategy) -> None:
        best, simulation, left = None, self._simulate(strategy), MOST_TURNS
        while simulation is not None and strategy.rounds < self._most_rounds():
            best = simulation if best is None else min(best, simulation, key=self._worth)
            # In large worlds, keep turns for further strategies.
            expensive = 2 * (left - self._left) > self._left / 2
            if self._fits(simulation) and (expensive or simulation.price > PAYS * best.price):
                break
            left, strategy = self._left, replace(strategy, rounds=min(2 * strategy.rounds, self._most_rounds()))
            simulation = self._simulate(strategy)

    def _other_orders(self, best: Strategy) -> Iterator[Strategy]:
        for order, cut in () if best.in_model_order else product(Order, Cut):
            # With many matrices per rank the order changes little.
            if order is best.order or self._left > MOST_TURNS // 2:
                yield replace(best, order=order, cut=cut)

    def _other_owners(self, best: Strategy) -> Iterator[Strategy]:
        for owners in range(1, len(STRATEGIES) if self._problem.pattern.has_owners else 0):
            if not self._ended() and self._assigned(owners) not in map(self._assigned, range(owners)):
                yield replace(best, owners=owners)

    def _other_rounds(self, best: Strategy) -> Iterator[Strategy]:
        for count in (best.rounds - 1, best.rounds + 1, 3 * best.rounds // 4, 3 * best.rounds // 2):
            if 1 <= count <= self._most_rounds():
                yield replace(best, rounds=count)

    def _most_rounds(self) -> int:
        most, owners = max(1, len(self._problem.tasks)), self._assigned(0)
        return most if not owners else min(TURNS[self._overlap] * max(Counter(owners.values()).values()), most)

    def _assigned(self, number: int) -> OwnerOf | None:
        # On demand: for tens of thousands of experts an assignment takes as long as a simulation.
        problem = self._problem
        if problem.owners is not None or not problem.pattern.has_owners:
            return problem.owners
        if number not in self._owners:
            load, eligible = problem.load, problem.eligible
            self._owners[number] = among(STRATEGIES[number], problem.tasks, problem.groups, load, eligible)
        return self._owners[number]

    def _fits(self, simulation: Simulation) -> bool:
        limit = self._problem.options.buffer_bytes
        return limit is None or simulation.buffer_bytes <= limit

    def _worth(self, simulation: Simulation) -> tuple[bool, float, int]:
        fits = self._fits(simulation)
        return not fits, simulation.price if fits else simulation.buffer_bytes, simulation.bytes

    def _best(self) -> Simulation:
        return min(self._simulations, key=self._worth)

    def _best_strategy(self, in_model_order: bool) -> Strategy:
        strategies = [strategy for strategy in self._simulated if strategy.in_model_order == in_model_order]
        return min(strategies or self._simulated, key=lambda strategy: self._worth(self._simulated[strategy]))

    def _ended(self) -> bool:
        if not self._simulations:
            return False
        best = self._best()
        if self._fits(best) and best.price <= max(NEAR_LIMIT * best.busiest, best.busiest + SHORT_SECONDS):
            return True
        if self._left <= 0:
            self._ending = f"the search for a faster plan stopped after {MOST_TURNS:,} simulated turns of single ranks"
        return self._left <= 0

    def _simulate(self, strategy: Strategy) -> Simulation | None:
        """The best over all numbers of buffer sets; None if the search has ended."""
        if strategy not in self._simulated:
            if self._ended():
                return None
            owners = self._assigned(strategy.owners)
            if owners is None or strategy.in_model_order:
                grouped = self._following(strategy.rounds)
            else:
                grouped = self._dealer.rounds(owners, strategy.rounds, strategy.order, strategy.cut)
                if self._overlap != "none":
                    pieces, eligible = self._problem.costs.pieces, self._problem.eligible
                    grouped, owners = in_model_order(grouped, owners, self._overlap, pieces, eligible)
            self._simulated[strategy] = self._add(grouped, owners)
        return self._simulated[strategy]

    def _following(self, count: int) -> list[list[Task]]:
        return rounds(self._problem.tasks, count, backward=self._overlap == "backward")

    def _add(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> Simulation:
        problem = self._problem
        if problem.sliced:
            grouped = together(grouped, problem.costs.pieces.matrices)
        buckets = self._buckets(grouped, owners)
        totals = Totals(buckets, problem.costs.pieces)
        times = [
            bucket_times(bucket, bucket_totals, problem.costs, self._place)
            for bucket, bucket_totals in zip(buckets, totals.of_buckets, strict=True)
        ]
        numbers, local = [bucket.round for bucket in buckets], [time.seconds for time in self._local]
        busiest = self._busiest(times)
        work = [
            step_bytes(self._local[place].owned, [t for _, t in totals.buckets[rank]], 0, problem.costs).work
            for rank, place in self._place.items()
        ]
        added = []
        ordered = ordered_rounds(buckets, self._overlap)
        # A pass of the model can hide every round with a buffer set.
        more = (len(grouped),) if ordered else ()
        for buffer_sets in dict.fromkeys(
            min(buffer_sets, max(1, len(grouped))) for buffer_sets in (*BUFFER_SETS, *more)
        ):
            self._left -= 3 * sum(len(bucket.group) for bucket in buckets)
            hidden = hidden_rounds(self._overlap, buffer_sets, len(grouped), ordered)
            seconds = max(simulate(times, numbers, local, buffer_sets, hidden), default=0.0)
            buffers = [totals.buffer_elements(rank, buffer_sets) * problem.options.wire_bytes for rank in self._place]
            rank_bytes = max((b + w for b, w in zip(buffers, work, strict=True)), default=0)
            added.append(Simulation(buckets, buffer_sets, seconds, max(buffers, default=0), rank_bytes, busiest))
        self._simulations += added
        return min(added, key=self._worth)

    def _buckets(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> tuple[Bucket, ...]:
        problem, buckets = self._problem, []
        for number, tasks in enumerate(grouped):
            by_group: dict[int, list[int]] = {}
            for task in tasks:
                by_group.setdefault(task.group, []).append(task.matrix)
            for group in sorted(by_group):
                matrices = tuple(by_group[group])
                ranks = () if owners is None else tuple(owners[matrix, group] for matrix in matrices)
                buckets.append(Bucket(problem.pattern.name, problem.groups[group], matrices, ranks, number))
        return tuple(buckets)

    def _busiest(self, times: Sequence[BucketTimes]) -> float:
        busy = [local.seconds for local in self._local]
        for bucket in times:
            parts = zip(bucket.group, bucket.pack, bucket.owned, bucket.copies, bucket.apply, strict=True)
            for index, pack, owned, copies, apply in parts:
                busy[index] += pack + owned.seconds + copies + apply
        return max(busy, default=0.0)

    def run_until_it_fits(self) -> None:
        """Simulate more and more rounds of consecutive matrices until `buffer_bytes` suffices."""
        tasks, count = self._problem.tasks, 1
        while not self._fits(self._best()):
            self._add(self._following(count), self._assigned(0))
            if count >= len(tasks):
                return
            count = min(2 * count, len(tasks))

    def chosen(self) -> Simulation:
        best = self._best()
        if not self._fits(best):
            raise OptionError(
                "buffer_bytes",
                f"= {self._problem.options.buffer_bytes} is too small: these matrices take at least "
                f"{best.buffer_bytes} bytes of buffers; raise it or use more ranks",
            )
        return replace(best, reason="; ".join(filter(None, (self._ending, self._memory_of(best)))))

    def _memory_of(self, best: Simulation) -> str:
        if best.bytes <= MORE_BYTES:
            return ""
        within = [simulation for simulation in self._simulations if simulation.bytes <= MORE_BYTES]
        other = min(within, key=lambda d: d.seconds) if within else min(self._simulations, key=lambda d: d.bytes)
        return (
            f"{best.bytes / 2**30:.1f} GiB of buffers and workspace, since with {other.bytes / 2**30:.1f} GiB a step "
            f"would take {other.seconds / best.seconds:.2f} x as long"
        )
