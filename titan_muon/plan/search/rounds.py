"""Rounds: the tasks in flight together, with a bucket per group in each round."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, groupby, pairwise

from ..terms.types import Matrix
from .owners import Groups, OwnerOf, Task


def rounds(tasks: Sequence[Task], count: int, *, backward: bool = False) -> list[list[Task]]:
    """Tasks in at most `count` rounds of consecutive matrices, in the order of a pass of the model."""
    # A single round would leave every rank idle until the gather and again until the return, with buffers for all
    # matrices. Rounds are global, because groups with common ranks must launch collectives in a common order.
    total, seen, sign = sum(task.bytes for task in tasks), 0, -1 if backward else 1
    result: list[list[Task]] = [[] for _ in range(count)]
    for task in sorted(tasks, key=lambda task: (sign * task.matrix, task.group)):
        result[count * (2 * seen + task.bytes) // (2 * total)].append(task)
        seen += task.bytes
    return [round_tasks for round_tasks in result if round_tasks]


class Order(Enum):
    """The order of a rank's matrices. Small matrices cost least in the first gather and the last return, because no
    computation hides these."""

    PEAKED = "small matrices first and last"
    ASCENDING = "small matrices first"
    DESCENDING = "small matrices last"


class Cut(Enum):
    """Where a rank's matrices are cut into rounds."""

    TIME = "all ranks end a round at about the same time"
    COUNT = "a rank has about as many matrices of a group in each round"


class Dealer:
    """Each rank has a queue of matrices to orthogonalize. `Dealer` cuts the queues into rounds."""

    # A round ends at the slowest owner.

    def __init__(self, tasks: Sequence[Task], groups: Groups) -> None:
        self._share = [0.0] * len(groups)
        for task in tasks:
            self._share[task.group] += task.bytes / len(groups[task.group])
        self._most = max(self._share, default=0.0)
        # Groups with few bytes come first, in a single round, because of each call's latency.
        share = self._share
        self._ascending = sorted(tasks, key=lambda t: (share[t.group], t.group, t.bytes, t.matrix))
        self._descending = sorted(tasks, key=lambda t: (share[t.group], t.group, -t.bytes, t.matrix))

    def rounds(self, owners: OwnerOf, count: int, order: Order, cut: Cut) -> list[list[Task]]:
        queues = self._queues(owners, order)
        result: list[list[Task]] = [[] for _ in range(count)]
        if cut is Cut.COUNT:
            for queue in queues:
                self._deal(queue, result)
        else:
            middles = _typical_times(queues, count)
            for queue in queues:
                for task, end in zip(queue, accumulate(task.flops for task in queue), strict=True):
                    result[bisect_left(middles, end)].append(task)
        return [round_tasks for round_tasks in result if round_tasks]

    def _deal(self, queue: Sequence[Task], result: Sequence[list[Task]]) -> None:
        for group, tasks in groupby(queue, key=lambda task: task.group):
            count = max(1, round(len(result) * self._share[group] / self._most))
            mine = list(tasks)
            for index, task in enumerate(mine):
                result[count * (2 * index + 1) // (2 * len(mine))].append(task)

    def _queues(self, owners: OwnerOf, order: Order) -> list[list[Task]]:
        by_owner: dict[int, list[Task]] = {}
        for task in self._descending if order is Order.DESCENDING else self._ascending:
            by_owner.setdefault(owners[task.matrix, task.group], []).append(task)
        if order is not Order.PEAKED:
            return list(by_owner.values())
        queues = []
        for queue in by_owner.values():
            start = next((i for i, task in enumerate(queue) if self._share[task.group] == self._most), len(queue))
            last = queue[start:]
            queues.append([*queue[:start], *last[::2], *reversed(last[1::2])])
        return queues


def _typical_times(queues: Sequence[Sequence[Task]], count: int) -> list[float]:
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


def together(rounds: Sequence[Sequence[Task]], matrices: Sequence[Matrix]) -> list[list[Task]]:
    """The rounds with all slices of a matrix in the round of its first slice."""
    place = {(task.matrix, task.group): number for number, tasks in enumerate(rounds) for task in tasks}
    result: list[list[Task]] = [[] for _ in rounds]
    for tasks in rounds:
        for task in tasks:
            matrix_slice = matrices[task.matrix].slice
            first = task.matrix if matrix_slice is None else task.matrix - matrix_slice.place
            result[place[first, task.group]].append(task)
    return [round_tasks for round_tasks in result if round_tasks]
