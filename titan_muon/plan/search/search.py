"""Which of the many possible plans to take: the fastest on the machine, within the memory that it may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ...options import OptionError, Overlap
from ..cost.timeline import play
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
SLOTS = (3, 2, 4, 1)
"""A round that is computed, one that comes and one that returns are three; two or one save memory, four even out."""
MOST_PLAYED = 400_000
"""Turns of single ranks that are played in a search."""
MOST_NEAR = MOST_PLAYED // 8
"""The same of a search that begins where that for a like problem was ended."""


@dataclass(frozen=True)
class Draft:
    """Buckets that could be the plan's: seconds of the step, bytes of buffers on the fullest rank, and of buffers and
    workspace together. `busiest` are the seconds that the busiest rank computes. `near` is where the search found it,
    as rounds and way, if it was ended before it had tried all it would."""

    buckets: tuple[Bucket, ...]
    slots: int
    seconds: float
    buffer_bytes: int
    bytes: int
    busiest: float
    reason: str = ""
    near: tuple[int, Way] | None = None

    @property
    def price(self) -> float:
        """Seconds, and what the memory beyond the free part is worth."""
        some, more = max(0, self.bytes - FREE_BYTES), max(0, self.bytes - MORE_BYTES)
        return self.seconds * (1 + (WORTH_OF_GIB * (some - more) + WORTH_OF_MORE * more) / 2**30)


@dataclass(frozen=True)
class Way:
    """How matrices are dealt out: the owners, by their place in STRATEGIES, the order of each owner's, and their cut.

    With `in_order` whoever owns them: in the order in which the model's backward, or its forward, comes to them.
    """

    owners: int = 0
    order: Order = Order.PEAKED
    cut: Cut = Cut.TIME
    in_order: bool = False


def fastest(problem: Problem, near: tuple[int, Way] | None = None) -> Draft:
    """The draft to take. Raises OptionError if the user's buffers are too small for any.

    `near` is of the draft of a like problem: what differs little from it is searched alone.
    """
    search = _Search(problem)
    if near is None:
        search.run()
    else:
        search.run_near(*near)
    # One round for a few matrices each, as many as there are matrices: slow, and the smallest buffers there are.
    search.smallest()
    return search.chosen()


class _Search:
    """Drafts that were played, and those to play next."""

    # All ranks search for themselves and must find the same plan. So what ends the search is a count of what was
    # played, never a clock.

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        ranks = problem.costs.pieces.ranks()
        self._place = {rank: index for index, rank in enumerate(ranks)}
        home = problem.costs.home(problem.home).values()
        self._home = [one.seconds for one in home]
        self._home_work = [(one.owned.assembled, one.owned.iteration) for one in home]
        self._dealer = Dealer(problem.tasks, problem.groups)
        self._drafts: list[Draft] = []
        self._played: dict[tuple[int, Way], Draft] = {}
        self._owners: dict[int, OwnerOf] = {}
        self._left = self._most = MOST_PLAYED
        self._ending = ""
        self._overlap: Overlap = problem.options.overlap
        self._model_order = ModelOrder(self._overlap, problem.costs.pieces, problem.able)

    def run(self) -> None:
        """Play numbers of rounds in the first way until more do not pay; then other ways; then numbers between."""
        most = self._most_rounds()
        # What the model hides may be less than what uneven rounds cost: then the step is one that hides nothing. Each
        # search by itself, or the first one's best would keep the other from being improved.
        for in_order in (True, False) if self._overlap != "none" else (False,):
            self._left = MOST_PLAYED
            if self._ended():
                return
            self._double(most, Way(in_order=in_order))
            best = None
            while best != self._best_played(in_order):
                best = self._best_played(in_order)
                self._vary(most, in_order)

    def run_near(self, count: int, way: Way) -> None:
        """Play so many rounds of a way, and what differs from that in one respect."""
        self._left = self._most = MOST_NEAR
        self._play(count, way)
        self._vary(self._most_rounds(), way.in_order)

    def _double(self, most: int, way: Way) -> None:
        """Play twice as many rounds of a way, and again, until more do not pay."""
        count, left = self._first_count(), self._left
        played = self._play(count, way)
        while played is not None and count < most:
            # Twice as many rounds have twice the turns. In large worlds some are kept for the other ways.
            dear = 2 * (left - self._left) > self._left / 2
            best = min((draft for (_, by), draft in self._played.items() if by == way), key=self._worth)
            if self._fits(played) and (dear or played.price > PAYS * best.price):
                break
            left, count = self._left, min(2 * count, most)
            played = self._play(count, way)

    def _vary(self, most: int, in_order: bool) -> None:
        """Play what differs from the best so far in one respect."""
        # The owners, how each one's matrices follow each other, and the number of rounds, one after the other and each
        # in the best way so far: all combinations would be ten times as many.
        count, way = self._best_played(in_order)
        for order, cut in () if way.in_order else product(Order, Cut):
            # Another order changes little where a rank has many matrices, and those worlds are large.
            if order is way.order or self._left > MOST_PLAYED // 2:
                self._play(count, replace(way, cut=cut, order=order))
        count, way = self._best_played(in_order)
        for owners in range(1, len(STRATEGIES) if self._problem.pattern.has_owners else 0):
            if not self._ended() and self._assigned(owners) not in map(self._assigned, range(owners)):
                self._play(count, replace(way, owners=owners))
        count, way = self._best_played(in_order)
        for near in (count - 1, count + 1, 3 * count // 4, 3 * count // 2):
            if 1 <= near <= most:
                self._play(near, way)

    def _first_count(self) -> int:
        """As many rounds as keep three of them within a few times the free memory."""
        taken = 2 * sum(task.bytes for task in self._problem.tasks) / max(1, len(self._place))
        return max(1, min(self._most_rounds(), int(taken * max(SLOTS) / (8 * FREE_BYTES))))

    def _most_rounds(self) -> int:
        """So many that each round has one matrix of every owner, or several owners take turns, see TURNS."""
        owners = self._assigned(0)
        if owners is None:
            return max(1, len(self._problem.tasks))
        most = max(Counter(owners.values()).values(), default=1)
        return min(TURNS[self._overlap] * most, max(1, len(self._problem.tasks)))

    def _assigned(self, number: int) -> OwnerOf | None:
        """The owners that are given or one of STRATEGIES finds, or None if nobody is to own anything."""
        # Not before they are played: for tens of thousands of experts it takes as long as to play them.
        problem = self._problem
        if problem.owners is not None or not problem.pattern.has_owners:
            return problem.owners
        if number not in self._owners:
            self._owners[number] = among(STRATEGIES[number], problem.tasks, problem.groups, problem.load, problem.able)
        return self._owners[number]

    def _fits(self, draft: Draft) -> bool:
        wanted = self._problem.options.buffer_bytes
        return wanted is None or draft.buffer_bytes <= wanted

    def _worth(self, draft: Draft) -> tuple[bool, float, int]:
        fits = self._fits(draft)
        return not fits, draft.price if fits else draft.buffer_bytes, draft.bytes

    def _best(self) -> Draft:
        return min(self._drafts, key=self._worth)

    def _best_played(self, in_order: bool) -> tuple[int, Way]:
        played = [key for key in self._played if key[1].in_order == in_order]
        return min(played, key=lambda key: self._worth(self._played[key]))

    def _ended(self) -> bool:
        """Whether there is little to gain, or too much has been played."""
        if not self._drafts:
            return False
        best = self._best()
        if self._fits(best) and best.price <= max(NEAR_LIMIT * best.busiest, best.busiest + SHORT_SECONDS):
            return True
        if self._left <= 0:
            self._ending = f"the search for a faster plan was ended after {self._most:,} turns of single ranks"
        return self._left <= 0

    def _play(self, count: int, way: Way) -> Draft | None:
        """Add the drafts of so many rounds dealt out in a way, one for each number of slots; returns the best of them,
        or None if the search has ended."""
        if (count, way) in self._played:
            return self._played[count, way]
        if self._ended():
            return None
        owners = self._assigned(way.owners)
        if owners is None or way.in_order:
            grouped = self._following(count)
        else:
            grouped = self._dealer.rounds(owners, count, way.order, way.cut)
            if self._overlap != "none":
                grouped, owners = self._model_order.exchanged(grouped, owners)
        best = self._played[count, way] = self._add(grouped, owners)
        return best

    def _following(self, count: int) -> list[list[Task]]:
        """The tasks in at most so many rounds, as they follow each other, or as the model comes to them."""
        tasks, groups = self._problem.tasks, self._problem.groups
        return rounds(tasks, groups, count) if self._overlap == "none" else self._model_order.rounds(tasks, count)

    def _add(self, grouped: Sequence[Sequence[Task]], owners: OwnerOf | None) -> Draft:
        problem = self._problem
        if problem.sliced:
            grouped = together(grouped, problem.costs.pieces.matrices)
        buckets = self._buckets(grouped, owners)
        totals = Totals(buckets, problem.costs.pieces)
        times = [
            bucket_times(bucket, found, problem.costs, self._place)
            for bucket, found in zip(buckets, totals.of_buckets, strict=True)
        ]
        numbers, work = [bucket.round for bucket in buckets], self._work(times)
        busiest = max(self._busy(times), default=0.0)
        added = []
        ordered = ordered_rounds(buckets, self._overlap)
        # In backward and in forward all can travel that have buffers of their own.
        more = (len(grouped),) if ordered else ()
        for slots in dict.fromkeys(min(slots, max(1, len(grouped))) for slots in (*SLOTS, *more)):
            self._left -= 3 * sum(len(bucket.group) for bucket in buckets)
            hidden = hidden_rounds(self._overlap, slots, len(grouped), ordered)
            seconds = max(play(times, numbers, self._home, slots, hidden), default=0.0)
            buffers = [totals.buffer_elements(rank, slots) * problem.options.wire_bytes for rank in self._place]
            taken = max((b + w for b, w in zip(buffers, work, strict=True)), default=0)
            added.append(Draft(buckets, slots, seconds, max(buffers, default=0), taken, busiest))
        self._drafts += added
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

    def _work(self, times: Sequence[BucketTimes]) -> list[int]:
        """Bytes of the workspace of each rank."""
        most = [list(pair) for pair in self._home_work]
        for one in times:
            for index, owned in zip(one.group, one.owned, strict=True):
                most[index][0] = max(most[index][0], owned.assembled)
                most[index][1] = max(most[index][1], owned.iteration)
        return [sum(pair) for pair in most]

    def _busy(self, times: Sequence[BucketTimes]) -> list[float]:
        busy = list(self._home)
        for one in times:
            for index, pack, owned, copies, apply in zip(
                one.group, one.pack, one.owned, one.copies, one.apply, strict=True
            ):
                busy[index] += pack + owned.seconds + copies + apply
        return busy

    def smallest(self) -> None:
        """Unless a draft fits, add those of more and more rounds of matrices that follow each other until one does."""
        owners, tasks, count = self._assigned(0), self._problem.tasks, 1
        while not self._fits(self._best()):
            self._add(self._following(count), owners)
            if count >= len(tasks):
                return
            count = min(2 * count, len(tasks))

    def chosen(self) -> Draft:
        """The draft that is worth most. Raises OptionError if the user's buffers are too small for any."""
        best = self._best()
        if not self._fits(best):
            raise OptionError(
                "buffer_bytes",
                f"= {self._problem.options.buffer_bytes} is too small: these matrices take at least "
                f"{best.buffer_bytes} bytes of buffers; raise it or use more ranks",
            )
        near = min(self._played, key=lambda key: self._worth(self._played[key])) if self._ending else None
        return replace(best, reason="; ".join(filter(None, (self._ending, self._memory_of(best)))), near=near)

    def _memory_of(self, best: Draft) -> str:
        """Why a draft takes much memory, or nothing."""
        if best.bytes <= MORE_BYTES:
            return ""
        within = [draft for draft in self._drafts if draft.bytes <= MORE_BYTES]
        other = min(within, key=lambda d: d.seconds) if within else min(self._drafts, key=lambda d: d.bytes)
        return (
            f"{best.bytes / 2**30:.1f} GiB of buffers and workspace, since with {other.bytes / 2**30:.1f} GiB a step "
            f"would take {other.seconds / best.seconds:.2f} x as long"
        )
