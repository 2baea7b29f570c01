"""Which matrices travel together: tasks in rounds, with one bucket for each group in a round."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, groupby, pairwise

from ..terms.types import Matrix
from .owners import Groups, OwnerOf, Task


def rounds(tasks: Sequence[Task], groups: Groups, count: int) -> list[list[Task]]:
    """Tasks in at most `count` rounds of consecutive tasks; in a round each group has one bucket."""
    # One bucket alone would leave every rank idle until all pieces are there, and again until all are back, with
    # buffers for all matrices at once. In rounds one is in flight while another is orthogonalized.
    # Rounds are the world's, not each group's own: only with one order of rounds on all ranks do overlapping groups
    # launch their collectives in one order. Two groups that share two ranks would otherwise wait for each other.
    # The group with most bytes per rank has `count` buckets and the others fewer, in the first rounds, so that buckets
    # are of about the same bytes on every rank; else small ones would cost as many calls as large ones.
    total, seen = [0] * len(groups), [0] * len(groups)
    for task in tasks:
        total[task.group] += task.bytes
    shares = [t / len(group) for t, group in zip(total, groups, strict=True)]
    counts = [max(1, round(count * share / max(shares, default=1))) for share in shares]
    result: list[list[Task]] = [[] for _ in range(count)]
    for task in tasks:
        middle = seen[task.group] + task.bytes / 2
        result[int(counts[task.group] * middle / total[task.group])].append(task)
        seen[task.group] += task.bytes
    return [chosen for chosen in result if chosen]


class Order(Enum):
    """The order in which a rank orthogonalizes what it owns."""

    # Nothing hides the first round's way to its owners, nor the last one's way back: there small matrices cost least.
    PEAKED = "small matrices first and last"
    ASCENDING = "small matrices first"
    DESCENDING = "small matrices last"


class Cut(Enum):
    """Where what a rank owns is cut into rounds."""

    TIME = "all ranks are done with a round at about the same time"
    COUNT = "a rank has about as many matrices of a group in each round"


class Dealer:
    """Deals tasks out to rounds by the queues of their owners.

    Args:
        tasks: of all groups.
        groups: ranks of each group.
    """

    # A round is over when its last owner is done. Cut by the order of the parameters, one rank would have two large
    # matrices in a round and another none, and all would wait for the first.

    def __init__(self, tasks: Sequence[Task], groups: Groups) -> None:
        self._share = [0.0] * len(groups)
        for task in tasks:
            self._share[task.group] += task.bytes / len(groups[task.group])
        self._most = max(self._share, default=0.0)
        # Groups with few bytes come before those with many, all at once: a call takes its latency however little it
        # carries.
        share = self._share
        self._ascending = sorted(tasks, key=lambda t: (share[t.group], t.group, t.bytes, t.matrix))
        self._descending = sorted(tasks, key=lambda t: (share[t.group], t.group, -t.bytes, t.matrix))

    def rounds(self, owners: OwnerOf, count: int, order: Order, cut: Cut) -> list[list[Task]]:
        """Tasks in at most `count` rounds."""
        queues = self._queue(owners, order)
        result: list[list[Task]] = [[] for _ in range(count)]
        if cut is Cut.COUNT:
            for queue in queues:
                self._deal(queue, result)
        else:
            middles = _typical_times(queues, count)
            for queue in queues:
                for task, end in zip(queue, accumulate(task.flops for task in queue), strict=True):
                    result[bisect_left(middles, end)].append(task)
        return [chosen for chosen in result if chosen]

    def _deal(self, queue: Sequence[Task], result: Sequence[list[Task]]) -> None:
        for group, tasks in groupby(queue, key=lambda task: task.group):
            # Groups with few bytes have fewer rounds, the first ones.
            count = max(1, round(len(result) * self._share[group] / self._most))
            mine = list(tasks)
            for index, task in enumerate(mine):
                result[count * (2 * index + 1) // (2 * len(mine))].append(task)

    def _queue(self, owners: OwnerOf, order: Order) -> list[list[Task]]:
        """What each owner has, in its order."""
        found: dict[int, list[Task]] = {}
        for task in self._descending if order is Order.DESCENDING else self._ascending:
            found.setdefault(owners[task.matrix, task.group], []).append(task)
        if order is not Order.PEAKED:
            return list(found.values())
        queues = []
        for queue in found.values():
            start = next((i for i, task in enumerate(queue) if self._share[task.group] == self._most), len(queue))
            last = queue[start:]
            queues.append([*queue[:start], *last[::2], *reversed(last[1::2])])
        return queues


def _typical_times(queues: Sequence[Sequence[Task]], count: int) -> list[float]:
    """FLOPs in the middle between the ends of two rounds, as most owners have them."""
    # What most owners have is cut, and what the others have is then put where it ends at the nearest time.
    alike = Counter(tuple(task.flops for task in queue) for queue in queues)
    typical = max(alike, key=lambda flops: (alike[flops], sum(flops), flops), default=())
    before, ends = 0, dict[int, int]()
    for flops in typical:
        number = count * (2 * before + flops) // max(1, 2 * sum(typical))
        before += flops
        ends[min(number, count - 1)] = before
    return [(low + high) / 2 for low, high in pairwise(sorted(ends.values()))]


def together(rounds: Sequence[Sequence[Task]], matrices: Sequence[Matrix]) -> list[list[Task]]:
    """The rounds with all slices of a matrix in that of its first one."""
    place = {(task.matrix, task.group): number for number, tasks in enumerate(rounds) for task in tasks}
    found: list[list[Task]] = [[] for _ in rounds]
    for tasks in rounds:
        for task in tasks:
            part = matrices[task.matrix].slice
            first = task.matrix if part is None else task.matrix - part.place
            found[place[first, task.group]].append(task)
    return [chosen for chosen in found if chosen]
