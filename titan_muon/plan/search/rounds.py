"""Rounds: the tasks in flight together, with a bucket per group in each round."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate, groupby, pairwise

from ...options import Overlap
from ..terms.pieces import Pieces, Ranks
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
    """The order of a rank's matrices, and where they are cut into rounds.

    Small matrices cost least in the first gather and the last return, because no computation hides these.
    """

    PEAKED = "small matrices first and last, and about as many of a group in each round"
    ASCENDING = "small matrices first, and all ranks end a round at about the same time"
    DESCENDING = "small matrices last, and all ranks end a round at about the same time"
    MODEL = "consecutive matrices, in the order of a pass of the model"


def dealt(tasks: Sequence[Task], groups: Groups, owners: OwnerOf, count: int, order: Order) -> list[list[Task]]:
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
    result: list[list[Task]] = [[] for _ in range(count)]
    middles = () if order is Order.PEAKED else _typical_times(by_owner.values(), count)
    for queue in by_owner.values():
        if order is not Order.PEAKED:
            for task, end in zip(queue, accumulate(task.flops for task in queue), strict=True):
                result[bisect_left(middles, end)].append(task)
            continue
        for group, group_tasks in groupby(_peaked(queue, share, most), key=lambda task: task.group):
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


def in_model_order(
    rounds: Sequence[Sequence[Task]],
    owners: OwnerOf,
    overlap: Overlap,
    pieces: Pieces,
    eligible: Mapping[int, Ranks],
) -> tuple[list[list[Task]], OwnerOf]:
    """The same rounds, nearly in order: tasks of equal cost change rounds and owners.

    Backward reaches the last parameters first, forward the first. `eligible`: the possible owners of a matrix, if fewer
    than the group.
    """

    def kind(task: Task) -> Hashable:
        # Slices keep their owners, because a team of ranks orthogonalizes the matrix together.
        sliced = task.matrix if pieces.matrices[task.matrix].slice is not None else None
        return task.group, pieces.kinds[task.matrix], task.flops, eligible.get(task.matrix), sliced

    # Backward launches a round at the last of its gradients; forward waits for a round at the first of its parameters.
    sign = -1 if overlap == "backward" else 1
    # Layers are equal, so rounds balanced over ranks can also be in the model's order, kind by kind.
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for number, tasks in enumerate(rounds):
        for place, task in enumerate(tasks):
            places.setdefault(kind(task), []).append((number, place))
    exchanged, owned = [list(tasks) for tasks in rounds], dict(owners)
    for positions in places.values():
        before = [rounds[number][place] for number, place in positions]
        after = sorted(before, key=lambda task: sign * task.matrix)
        for (number, place), old, new in zip(positions, before, after, strict=True):
            exchanged[number][place] = new
            owned[new.matrix, new.group] = owners[old.matrix, old.group]
    return exchanged, owned
