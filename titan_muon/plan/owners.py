"""Who orthogonalizes what: functions from tasks to owners, by their names in a recipe.

Every function is deterministic, so that all ranks make the same plan without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BYTES_OVER_MEAN = 1.3


@dataclass(frozen=True)
class Task:
    """A matrix that needs an owner.

    The owner is one of the ranks of `groups[group]`. `flops` and `bytes` are what the matrix costs its owner in
    Newton-Schulz and in buffers; `layer` names the layer it is part of.
    """

    matrix: int
    group: int
    flops: int
    bytes: int
    layer: str


Groups = Sequence[tuple[int, ...]]
Rounds = Sequence[Sequence[Task]]
Owners = dict[tuple[int, int], int]
"""Owner of each (matrix, group)."""


def balanced(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """Longest processing time first, over all tasks, by FLOPs, on top of the FLOPs that each rank has at home.

    A rank whose bytes are over 1.3 x its group's mean takes another matrix only when all others are over it too.
    Within 4/3 of the best makespan (Graham, 1969).
    """
    return _longest_first([[task for tasks in rounds for task in tasks]], groups, load)


def balanced_rounds(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """As `balanced`, but one round after the other, for rounds that wait for each other."""
    return _longest_first(rounds, groups, load)


def _longest_first(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    loads = dict(load)
    limits = _byte_limits(rounds, groups)
    held: list[dict[int, int]] = [dict.fromkeys(group, 0) for group in groups]
    owners: Owners = {}
    for tasks in rounds:
        for index, mine in _by_group(tasks, groups).items():
            owned = held[index]
            heap = [(loads.get(rank, 0), owned[rank], rank) for rank in groups[index]]
            heapq.heapify(heap)
            for task in sorted(mine, key=lambda t: (-t.flops, t.matrix)):
                flops, bytes_, rank = _pop_under(heap, limits[index] - task.bytes)
                owners[task.matrix, index] = rank
                loads[rank], owned[rank] = flops + task.flops, bytes_ + task.bytes
                heapq.heappush(heap, (loads[rank], owned[rank], rank))
    return owners


def _pop_under(heap: list[tuple[int, int, int]], limit: float) -> tuple[int, int, int]:
    """The least loaded entry with at most `limit` bytes, or the least loaded of all when none has room."""
    passed = []
    while heap:
        entry = heapq.heappop(heap)
        if entry[1] <= limit:
            break
        passed.append(entry)
    else:
        entry = passed.pop(0)
    for other in passed:
        heapq.heappush(heap, other)
    return entry


def _byte_limits(rounds: Rounds, groups: Groups) -> list[float]:
    total, largest = [0] * len(groups), [0] * len(groups)
    for tasks in rounds:
        for task in tasks:
            total[task.group] += task.bytes
            largest[task.group] = max(largest[task.group], task.bytes)
    return [max(BYTES_OVER_MEAN * t / len(g), m) for t, m, g in zip(total, largest, groups, strict=True)]


def _by_group(tasks: Sequence[Task], groups: Groups) -> dict[int, list[Task]]:
    """Tasks by group, large groups first: what only few ranks can own evens out what many share."""
    found: dict[int, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.group, []).append(task)
    return dict(sorted(found.items(), key=lambda item: (-len(groups[item[0]]), item[0])))


def round_robin(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """The i-th matrix of a group goes to rank i modulo its size, in the order of the parameters."""
    grouped = _by_group([task for tasks in rounds for task in tasks], groups)
    return {
        (task.matrix, index): groups[index][i % len(groups[index])]
        for index, mine in grouped.items()
        for i, task in enumerate(mine)
    }


def per_layer(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """All matrices of a layer go to one rank, the layers in turn."""
    owners: Owners = {}
    for index, mine in _by_group([task for tasks in rounds for task in tasks], groups).items():
        turn = {layer: i % len(groups[index]) for i, layer in enumerate(dict.fromkeys(task.layer for task in mine))}
        owners |= {(task.matrix, index): groups[index][turn[task.layer]] for task in mine}
    return owners


OWNERS: Mapping[str, tuple[Callable[[Rounds, Groups, Mapping[int, int]], Owners], ...]] = {
    "balanced": (balanced, balanced_rounds),
    "round_robin": (round_robin,),
    "per_layer": (per_layer,),
}
"""For each name the functions to try; the planner keeps the one whose longest path is the shortest."""
