"""Which of the many possible plans to take: the fastest on the machine, within the memory that it may take."""

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
from .model_order import ModelOrder
from .owners import STRATEGIES, OwnerOf, Task, among
from .problem import Problem
from .rounds import Cut, Dealer, Order, rounds, together

FREE_BYTES = 2**30
"""Buffers and workspace that a step may take without a gain in time for it."""
WORTH_OF_GIB = 0.03
"""Part of the step's time that every further GiB has to save."""
MORE_BYTES = 2 * 2**30
"""Buffers and workspace from which on it has to be more, and the plan says why it takes them."""
WORTH_OF_MORE = 0.1
"""Part of the step's time that every GiB beyond these has to save."""
NEAR_LIMIT = 1.01
"""A plan so near to what its busiest rank computes is not improved."""
SHORT_SECONDS = 1e-4
"""Waits that are not worth a search."""
PAYS = 1.1
"""More rounds are tried while none is slower than the best by more than this factor."""
TURNS: Mapping[Overlap, int] = {"none": 2, "backward": 2, "forward": 16}
"""Rounds for each matrix of the busiest owner. Forward waits for the first one, which is shorter the more there are."""
BUFFER_SETS = (3, 2, 4, 1)
"""A round that is computed, one that comes and one that returns are three; two or one save memory, four even out."""
MOST_TURNS = 400_000
"""Turns of single ranks that are played in a search."""


@dataclass(frozen=True)
class Simulation:
    """Buckets that could be the plan's.

    Attributes:
        buckets: in the order of their rounds.
        slots: rounds that have buffers at a time.
        seconds: of the step.
        buffer_bytes: of the exchange, on the fullest rank.
        bytes: of buffers and workspace, on the fullest rank.
        busiest: seconds that the busiest rank computes.
        reason: notes for the user: the search was ended, much memory was taken.
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
        """Seconds, and what the memory beyond the free part is worth."""
        some, more = max(0, self.bytes - FREE_BYTES), max(0, self.bytes - MORE_BYTES)
        return self.seconds * (1 + (WORTH_OF_GIB * (some - more) + WORTH_OF_MORE * more) / 2**30)


@dataclass(frozen=True)
class Strategy:
    """How matrices are dealt to at most `rounds` rounds.

    Attributes:
        rounds: most rounds.
        in_model_order: rounds follow the model's backward or forward, and `order` and `cut` do not count.
        owners: place in STRATEGIES.
        order: of the matrices of each owner.
        cut: where they are cut into rounds.
    """

    rounds: int
    in_model_order: bool = False
    owners: int = 0
    order: Order = Order.PEAKED
    cut: Cut = Cut.TIME


def fastest(problem: Problem) -> Simulation:
    """The draft to take. Raises OptionError if the user's buffers are too small for any."""
    search = _Search(problem)
    # What the model hides may save less than uneven rounds cost. Both kinds are searched, each by itself, or the best
    # strategy of the first kind would keep those of the other from being improved.
    for in_model_order in (True, False) if problem.options.overlap != "none" else (False,):
        search.run(in_model_order)
    search.run_until_it_fits()
    return search.chosen()


class _Search:
    """Simulated drafts, by strategy."""

    # All ranks search for themselves and must find the same plan. So the search ends by a count of simulated turns,
    # never by a clock.

    def __init__(self, problem: Problem) -> None:
        self._problem, self._overlap = problem, problem.options.overlap
        self._place = {rank: index for index, rank in enumerate(problem.costs.pieces.ranks())}
        self._local = list(problem.costs.local(problem.local).values())
        self._dealer = Dealer(problem.tasks, problem.groups)
        self._model_order = ModelOrder(self._overlap, problem.costs.pieces, problem.able)
        self._simulations: list[Simulation] = []
        self._simulated: dict[Strategy, Simulation] = {}
        self._owners: dict[int, OwnerOf] = {}
        self._left = MOST_TURNS
        self._ending = ""

    def run(self, in_model_order: bool) -> None:
        """Double the number of rounds until more do not pay, then change the best strategy in one respect at a time."""
        self._left = MOST_TURNS
        self._double(Strategy(self._first_rounds(), in_model_order))
        best = None
        while self._simulated and best != (best := self._best_strategy(in_model_order)):
            # One respect after the other, each from the best so far: all combinations would be ten times as many.
            for neighbours in (self._other_orders, self._other_owners, self._other_rounds):
                for strategy in neighbours(self._best_strategy(in_model_order)):
                    self._simulate(strategy)

    def _double(self, strategy: Strategy) -> None:
        best, played, left = None, self._simulate(strategy), MOST_TURNS
        while played is not None and strategy.rounds < self._most_rounds():
            best = played if best is None else min(best, played, key=self._worth)
            # Twice as many rounds have twice the turns. In large worlds some are kept for other strategies.
            dear = 2 * (left - self._left) > self._left / 2
            if self._fits(played) and (dear or played.price > PAYS * best.price):
                break
            left, strategy = self._left, replace(strategy, rounds=min(2 * strategy.rounds, self._most_rounds()))
            played = self._simulate(strategy)

    def _other_orders(self, best: Strategy) -> Iterator[Strategy]:
        for order, cut in () if best.in_model_order else product(Order, Cut):
            # Another order changes little where a rank has many matrices, and those worlds are large.
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

    def _first_rounds(self) -> int:
        """As many rounds as keep three of them within a few times the free memory."""
        taken = 2 * sum(task.bytes for task in self._problem.tasks) / max(1, len(self._place))
        return max(1, min(self._most_rounds(), int(taken * max(BUFFER_SETS) / (8 * FREE_BYTES))))

    def _most_rounds(self) -> int:
        """So many that each round has one matrix of every owner, or several owners take turns, see TURNS."""
        most, owners = max(1, len(self._problem.tasks)), self._assigned(0)
        return most if not owners else min(TURNS[self._overlap] * max(Counter(owners.values()).values()), most)

    def _assigned(self, number: int) -> OwnerOf | None:
        """The owners that the problem or one of STRATEGIES decides, None if matrices have no owners."""
        # Not before they are played: for tens of thousands of experts it takes as long as to play them.
        problem = self._problem
        if problem.owners is not None or not problem.pattern.has_owners:
            return problem.owners
        if number not in self._owners:
            self._owners[number] = among(STRATEGIES[number], problem.tasks, problem.groups, problem.load, problem.able)
        return self._owners[number]

    def _fits(self, simulation: Simulation) -> bool:
        wanted = self._problem.options.buffer_bytes
        return wanted is None or simulation.buffer_bytes <= wanted

    def _worth(self, simulation: Simulation) -> tuple[bool, float, int]:
        fits = self._fits(simulation)
        return not fits, simulation.price if fits else simulation.buffer_bytes, simulation.bytes

    def _best(self) -> Simulation:
        return min(self._simulations, key=self._worth)

    def _best_strategy(self, in_model_order: bool) -> Strategy:
        played = [strategy for strategy in self._simulated if strategy.in_model_order == in_model_order]
        return min(played or self._simulated, key=lambda strategy: self._worth(self._simulated[strategy]))

    def _ended(self) -> bool:
        """Whether there is little to gain, or too much has been played."""
        if not self._simulations:
            return False
        best = self._best()
        if self._fits(best) and best.price <= max(NEAR_LIMIT * best.busiest, best.busiest + SHORT_SECONDS):
            return True
        if self._left <= 0:
            self._ending = f"the search for a faster plan was ended after {MOST_TURNS:,} turns of single ranks"
        return self._left <= 0

    def _simulate(self, strategy: Strategy) -> Simulation | None:
        """The best draft of a strategy over all numbers of slots; None if the search has ended."""
        if strategy not in self._simulated:
            if self._ended():
                return None
            owners = self._assigned(strategy.owners)
            if owners is None or strategy.in_model_order:
                grouped = self._following(strategy.rounds)
            else:
                grouped = self._dealer.rounds(owners, strategy.rounds, strategy.order, strategy.cut)
                if self._overlap != "none":
                    grouped, owners = self._model_order.exchanged(grouped, owners)
            self._simulated[strategy] = self._add(grouped, owners)
        return self._simulated[strategy]

    def _following(self, count: int) -> list[list[Task]]:
        """The tasks in at most so many rounds, as they follow each other, or as the model comes to them."""
        tasks, groups = self._problem.tasks, self._problem.groups
        return rounds(tasks, groups, count) if self._overlap == "none" else self._model_order.rounds(tasks, count)

    def _add(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> Simulation:
        """Simulate these rounds with each number of slots. Returns the best draft."""
        problem = self._problem
        if problem.sliced:
            grouped = together(grouped, problem.costs.pieces.matrices)
        buckets = self._buckets(grouped, owners)
        totals = Totals(buckets, problem.costs.pieces)
        times = [
            bucket_times(bucket, found, problem.costs, self._place)
            for bucket, found in zip(buckets, totals.of_buckets, strict=True)
        ]
        numbers, local = [bucket.round for bucket in buckets], [one.seconds for one in self._local]
        busiest = self._busiest(times)
        work = [
            step_bytes(self._local[place].owned, [each for _, each in totals.buckets[rank]], 0, problem.costs).work
            for rank, place in self._place.items()
        ]
        added = []
        ordered = ordered_rounds(buckets, self._overlap)
        # In backward and in forward all can travel that have buffers of their own.
        more = (len(grouped),) if ordered else ()
        for buffer_sets in dict.fromkeys(
            min(buffer_sets, max(1, len(grouped))) for buffer_sets in (*BUFFER_SETS, *more)
        ):
            self._left -= 3 * sum(len(bucket.group) for bucket in buckets)
            hidden = hidden_rounds(self._overlap, buffer_sets, len(grouped), ordered)
            seconds = max(simulate(times, numbers, local, buffer_sets, hidden), default=0.0)
            buffers = [totals.buffer_elements(rank, buffer_sets) * problem.options.wire_bytes for rank in self._place]
            taken = max((b + w for b, w in zip(buffers, work, strict=True)), default=0)
            added.append(Simulation(buckets, buffer_sets, seconds, max(buffers, default=0), taken, busiest))
        self._simulations += added
        return min(added, key=self._worth)

    def _buckets(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> tuple[Bucket, ...]:
        problem, found = self._problem, []
        for number, tasks in enumerate(grouped):
            by_group: dict[int, list[int]] = {}
            for task in tasks:
                by_group.setdefault(task.group, []).append(task.matrix)
            for group in sorted(by_group):
                chosen = tuple(by_group[group])
                ranks = () if owners is None else tuple(owners[matrix, group] for matrix in chosen)
                found.append(Bucket(problem.pattern.name, problem.groups[group], chosen, ranks, number))
        return tuple(found)

    def _busiest(self, times: Sequence[BucketTimes]) -> float:
        """Seconds that the busiest rank computes."""
        busy = [local.seconds for local in self._local]
        for one in times:
            parts = zip(one.group, one.pack, one.owned, one.copies, one.apply, strict=True)
            for index, pack, owned, copies, apply in parts:
                busy[index] += pack + owned.seconds + copies + apply
        return max(busy, default=0.0)

    def run_until_it_fits(self) -> None:
        """Unless a draft fits, simulate more and more rounds of matrices that follow each other until one does."""
        # One round for a few matrices each is slow, and has the smallest buffers there are.
        tasks, count = self._problem.tasks, 1
        while not self._fits(self._best()):
            self._add(self._following(count), self._assigned(0))
            if count >= len(tasks):
                return
            count = min(2 * count, len(tasks))

    def chosen(self) -> Simulation:
        """The draft that is worth most. Raises OptionError if the user's buffers are too small for any."""
        best = self._best()
        if not self._fits(best):
            raise OptionError(
                "buffer_bytes",
                f"= {self._problem.options.buffer_bytes} is too small: these matrices take at least "
                f"{best.buffer_bytes} bytes of buffers; raise it or use more ranks",
            )
        return replace(best, reason="; ".join(filter(None, (self._ending, self._memory_of(best)))))

    def _memory_of(self, best: Simulation) -> str:
        """Why a draft takes much memory, or nothing."""
        if best.bytes <= MORE_BYTES:
            return ""
        within = [simulation for simulation in self._simulations if simulation.bytes <= MORE_BYTES]
        other = min(within, key=lambda d: d.seconds) if within else min(self._simulations, key=lambda d: d.bytes)
        return (
            f"{best.bytes / 2**30:.1f} GiB of buffers and workspace, since with {other.bytes / 2**30:.1f} GiB a step "
            f"would take {other.seconds / best.seconds:.2f} x as long"
        )
