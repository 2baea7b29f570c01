"""Who orthogonalizes what: functions from tasks to owners, by their names in a recipe.

Every function is deterministic, so that all ranks make the same plan without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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

    A rank takes no more than 1.3 x the mean of bytes as long as another rank has room.
    Groups of many ranks go first, so that those of few even them out. Where all ranks are one group, the longest rank
    is within 4/3 of the best possible (Graham, 1969).
    """
    return _longest_first([_flat(rounds)], groups, load)


def balanced_small_first(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """As `balanced`, but groups of few ranks go first, so that those of many make room for them."""
    return _longest_first([_flat(rounds)], groups, load, small_first=True)


def balanced_rounds(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """As `balanced`, but one round after the other, for rounds that wait for each other."""
    return _longest_first(rounds, groups, load)


def _flat(rounds: Rounds) -> list[Task]:
    return [task for tasks in rounds for task in tasks]


def _longest_first(rounds: Rounds, groups: Groups, load: Mapping[int, int], *, small_first: bool = False) -> Owners:
    loads = dict(load)
    held = dict.fromkeys((rank for group in groups for rank in group), 0)
    limit = _byte_limit(_flat(rounds), len(held))
    owners: Owners = {}
    for tasks in rounds:
        grouped = _by_group(tasks, groups)
        for index in reversed(grouped) if small_first else grouped:
            heap = [(loads.get(rank, 0), held[rank], rank) for rank in groups[index]]
            heapq.heapify(heap)
            for task in _spread(grouped[index]):
                flops, bytes_, rank = _pop_under(heap, limit - task.bytes)
                owners[task.matrix, index] = rank
                loads[rank], held[rank] = flops + task.flops, bytes_ + task.bytes
                heapq.heappush(heap, (loads[rank], held[rank], rank))
    return owners


def _spread(tasks: Sequence[Task]) -> Iterator[Task]:
    """Longest first. Each class of equal tasks starts one layer later than the class before it.

    Ranks that are even take the tasks of a class in turn, so without that shift the first would get all of layer 0.
    """
    ordered = sorted(tasks, key=lambda t: (-t.flops, t.matrix))
    for shift, (_, equal) in enumerate(groupby(ordered, key=lambda t: t.flops)):
        same = list(equal)
        start = shift % len(same)
        yield from same[start:] + same[:start]


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


def _byte_limit(tasks: Sequence[Task], ranks: int) -> float:
    if not tasks:
        return 0.0
    return max(BYTES_OVER_MEAN * sum(task.bytes for task in tasks) / ranks, *(task.bytes for task in tasks))


def _by_group(tasks: Sequence[Task], groups: Groups) -> dict[int, list[Task]]:
    """Tasks by group, large groups first: what only few ranks can own evens out what many share."""
    found: dict[int, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.group, []).append(task)
    return dict(sorted(found.items(), key=lambda item: (-len(groups[item[0]]), item[0])))


def round_robin(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """The i-th matrix of a group goes to rank i modulo its size, in the order of the parameters."""
    grouped = _by_group(_flat(rounds), groups)
    return {
        (task.matrix, index): groups[index][i % len(groups[index])]
        for index, mine in grouped.items()
        for i, task in enumerate(mine)
    }


def per_layer(rounds: Rounds, groups: Groups, load: Mapping[int, int]) -> Owners:
    """All matrices of a layer go to one rank, the layers in turn."""
    owners: Owners = {}
    for index, mine in _by_group(_flat(rounds), groups).items():
        turn = {layer: i % len(groups[index]) for i, layer in enumerate(dict.fromkeys(task.layer for task in mine))}
        owners |= {(task.matrix, index): groups[index][turn[task.layer]] for task in mine}
    return owners


OWNERS: Mapping[str, tuple[Callable[[Rounds, Groups, Mapping[int, int]], Owners], ...]] = {
    "balanced": (balanced, balanced_rounds, balanced_small_first),
    "round_robin": (round_robin,),
    "per_layer": (per_layer,),
}
"""For each name the functions to try; the planner keeps the one whose longest path is the shortest."""
