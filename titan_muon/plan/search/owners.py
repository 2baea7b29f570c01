"""The owner of each task."""

# Every rank computes the owners: deterministic, with ties to the lowest rank.

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..terms.pieces import Ranks

BYTES_OVER_MEAN = 1.3
"""Most bytes of a rank, relative to the mean."""


class Task(NamedTuple):
    """A matrix for a rank of `groups[group]`, with the cost."""

    matrix: int
    group: int
    flops: int
    bytes: int
    layer: str


Groups = Sequence[Ranks]
OwnerOf = dict[tuple[int, int], int]
"""Owner by (matrix, group)."""
Assign = Callable[[Sequence[Task], Groups, Mapping[int, int]], OwnerOf]
Heap = list[tuple[int, int, int]]
"""(FLOPs, bytes, rank) of the ranks of a group, least loaded first."""


class Balancer:
    """Assigns `tasks` to the least loaded of `ranks`; `load`: initial FLOPs of each rank."""

    # FLOPs decide, with a limit of bytes, because a rank without large matrices would own too many small matrices.

    def __init__(self, tasks: Sequence[Task], ranks: Iterable[int], load: Mapping[int, int]) -> None:
        self._flops = {rank: load.get(rank, 0) for rank in ranks}
        self._bytes = dict.fromkeys(self._flops, 0)
        sizes = [task.bytes for task in tasks]
        # At least the largest task, which must fit on some rank.
        self._limit = max([int(BYTES_OVER_MEAN * sum(sizes) / max(1, len(self._flops))), *sizes])

    def heap(self, ranks: Sequence[int]) -> Heap:
        """A heap for `assign`. A rank's other heaps are not updated when the rank receives a task."""
        heap = [(self._flops[rank], self._bytes[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        return heap

    def assign(self, task: Task, heap: Heap, barred: Collection[int] = ()) -> int:
        """Assign to the least loaded rank with room for the bytes; ranks of `barred` only as a last resort."""
        _, _, rank = _pop(heap, self._limit - task.bytes, barred)
        self.add_work(task, rank)
        heapq.heappush(heap, (self._flops[rank], self._bytes[rank], rank))
        return rank

    def add_work(self, task: Task, rank: int) -> int:
        self._flops[rank] += task.flops
        self._bytes[rank] += task.bytes
        return rank

    def least(self) -> int:
        return min(self._flops, key=lambda rank: (self._flops[rank], self._bytes[rank], rank))

    def latest_end(self, ranks: Sequence[int]) -> int:
        return max(self._flops[rank] for rank in ranks)

    def longest(self) -> int:
        return max(self._flops.values(), default=0)

    def lightest(self) -> int:
        return min(self._bytes, key=lambda rank: (self._bytes[rank], rank))


def _pop(heap: Heap, most: int, barred: Collection[int]) -> tuple[int, int, int]:
    passed = []
    while heap:
        entry = heapq.heappop(heap)
        if entry[1] <= most and entry[2] not in barred:
            break
        passed.append(entry)
    else:
        # A soft limit, because some rank must own the matrix.
        entry = next((candidate for candidate in passed if candidate[2] not in barred), passed[0])
        passed.remove(entry)
    for candidate in passed:
        heapq.heappush(heap, candidate)
    return entry


def balanced(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int], *, small_first: bool = False) -> OwnerOf:
    """Assign longest first, on top of each rank's local FLOPs; groups of many ranks first.

    For a single group of all ranks, the busiest rank is within 4/3 of the optimum (Graham, 1969).
    """
    # The search tries both orders, because large matrices of the last groups may not even out the load.
    balancer = Balancer(tasks, (rank for group in groups for rank in group), load)
    owners: OwnerOf = {}
    grouped = by_group(tasks, groups)
    for index in reversed(grouped) if small_first else grouped:
        heap = balancer.heap(groups[index])
        owners |= {(task.matrix, index): balancer.assign(task, heap) for task in spread(grouped[index])}
    return owners


def balanced_small_first(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """Like `balanced`, with groups of few ranks first."""
    return balanced(tasks, groups, load, small_first=True)


def balanced_bytes(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """Like `balanced`, by bytes, for links slower than Newton-Schulz."""
    return balanced([task._replace(flops=task.bytes) for task in tasks], groups, {})


def among(
    assign: Assign, tasks: Sequence[Task], groups: Groups, load: Mapping[int, int], eligible: Mapping[int, Ranks]
) -> OwnerOf:
    """Like `assign`, but with the owner of each matrix in `eligible` among these ranks."""
    if not eligible:
        return assign(tasks, groups, load)
    narrow = {ranks: number for number, ranks in enumerate(dict.fromkeys((*groups, *eligible.values())))}
    narrowed = {
        task: task._replace(group=narrow[eligible[task.matrix]]) if task.matrix in eligible else task for task in tasks
    }
    owners = assign(list(narrowed.values()), tuple(narrow), load)
    return {(task.matrix, task.group): owners[new.matrix, new.group] for task, new in narrowed.items()}


def spread(tasks: Sequence[Task]) -> Iterator[Task]:
    """Assign longest first; each class of equal tasks starts one layer later than the previous class."""
    # Ranks take the tasks of a class in turn: without the shift the first rank would get all of layer 0, in one round.
    ordered = sorted(tasks, key=lambda t: (-t.flops, t.matrix))
    for shift, (_, equal) in enumerate(groupby(ordered, key=lambda t: t.flops)):
        same = list(equal)
        start = shift % len(same)
        yield from same[start:] + same[:start]


def by_group(tasks: Sequence[Task], groups: Groups) -> dict[int, list[Task]]:
    """Tasks by group, large groups first, so that small groups even out the load."""
    by_index: dict[int, list[Task]] = {}
    for task in tasks:
        by_index.setdefault(task.group, []).append(task)
    return dict(sorted(by_index.items(), key=lambda item: (-len(groups[item[0]]), item[0])))


STRATEGIES: tuple[Assign, ...] = (balanced, balanced_small_first, balanced_bytes)
