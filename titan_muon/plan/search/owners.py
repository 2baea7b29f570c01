"""Who orthogonalizes what: the balancer, and the strategies that map tasks to owners."""

# All of it is deterministic, ties included, which go to the lowest rank: every rank finds the owners for itself, and
# two ranks that found different ones would send pieces to where nobody expects them.

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

BYTES_OVER_MEAN = 1.3


class Task(NamedTuple):
    """A matrix that needs one of the ranks of `groups[group]` as its owner, and what it costs that rank."""

    matrix: int
    group: int
    flops: int
    bytes: int
    layer: str


Ranks = tuple[int, ...]
Groups = Sequence[Ranks]
OwnerOf = dict[tuple[int, int], int]
"""Rank that owns each (matrix, group)."""
Assign = Callable[[Sequence[Task], Groups, Mapping[int, int]], OwnerOf]
Heap = list[tuple[int, int, int]]
"""(FLOPs, bytes, rank) of the ranks of a group, the least loaded first."""


class Balancer:
    """Gives `tasks`, longest first, to the least loaded of `ranks`, on top of the FLOPs in `load`."""

    # FLOPs decide, since Newton-Schulz is most of a step. But with FLOPs alone a rank without large matrices would be
    # given a great many small ones, and its buffers or its shard of the model would not fit where all others' do.

    def __init__(self, tasks: Sequence[Task], ranks: Iterable[int], load: Mapping[int, int]) -> None:
        self._flops = {rank: load.get(rank, 0) for rank in ranks}
        self._bytes = dict.fromkeys(self._flops, 0)
        sizes = [task.bytes for task in tasks]
        # At least the largest, or no rank would ever have room for it.
        self._limit = max([int(BYTES_OVER_MEAN * sum(sizes) / max(1, len(self._flops))), *sizes])

    def heap(self, ranks: Sequence[int]) -> Heap:
        """The ranks of a group as `give` takes them; a rank that is given a task by another heap is outdated in it."""
        heap = [(self._flops[rank], self._bytes[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        return heap

    def give(self, task: Task, heap: Heap, barred: Collection[int] = ()) -> int:
        """The owner of a task: the least loaded with room for its bytes; one of `barred` only if there is no other."""
        _, _, rank = _pop(heap, self._limit - task.bytes, barred)
        self.put(task, rank)
        heapq.heappush(heap, (self._flops[rank], self._bytes[rank], rank))
        return rank

    def put(self, task: Task, rank: int) -> int:
        """Give a task to a rank that is chosen already. Returns the rank."""
        self._flops[rank] += task.flops
        self._bytes[rank] += task.bytes
        return rank

    def least(self) -> int:
        """The rank with the least to do, and of those the one with the fewest bytes."""
        return min(self._flops, key=lambda rank: (self._flops[rank], self._bytes[rank], rank))

    def ends(self, ranks: Sequence[int]) -> int:
        """FLOPs of the rank of these with most to do."""
        return max(self._flops[rank] for rank in ranks)

    def longest(self) -> int:
        """FLOPs of the rank with most to do."""
        return max(self._flops.values(), default=0)

    def lightest(self) -> int:
        """The rank with the fewest bytes."""
        return min(self._bytes, key=lambda rank: (self._bytes[rank], rank))


def _pop(heap: Heap, most: int, barred: Collection[int]) -> tuple[int, int, int]:
    passed = []
    while heap:
        entry = heapq.heappop(heap)
        if entry[1] <= most and entry[2] not in barred:
            break
        passed.append(entry)
    else:
        # The limit is soft: the matrix has to be somewhere, and the user's own limit of buffers is checked on the plan.
        entry = next((other for other in passed if other[2] not in barred), passed[0])
        passed.remove(entry)
    for other in passed:
        heapq.heappush(heap, other)
    return entry


def balanced(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int], *, small_first: bool = False) -> OwnerOf:
    """Longest first over all tasks, on top of the FLOPs that each rank has at home; groups of many ranks go first.

    Where all ranks are one group, the longest rank is within 4/3 of the best possible (Graham, 1969).
    """
    # Where groups overlap neither order of groups has a bound: small groups last can even out what large ones left,
    # unless their matrices are too large for that; large groups last can, unless theirs are. So the search tries both.
    balancer = Balancer(tasks, (rank for group in groups for rank in group), load)
    owners: OwnerOf = {}
    grouped = by_group(tasks, groups)
    for index in reversed(grouped) if small_first else grouped:
        heap = balancer.heap(groups[index])
        owners |= {(task.matrix, index): balancer.give(task, heap) for task in spread(grouped[index])}
    return owners


def balanced_small_first(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """As `balanced`, but groups of few ranks go first, so that those of many make room for them."""
    return balanced(tasks, groups, load, small_first=True)


def balanced_bytes(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """As `balanced`, but by bytes, for links that take longer than Newton-Schulz."""
    return balanced([task._replace(flops=task.bytes) for task in tasks], groups, {})


def among(
    assign: Assign, tasks: Sequence[Task], groups: Groups, load: Mapping[int, int], able: Mapping[int, Ranks]
) -> OwnerOf:
    """As `assign`, but each matrix in `able` goes to one of these ranks of its group."""
    if not able:
        return assign(tasks, groups, load)
    narrow = {ranks: number for number, ranks in enumerate(dict.fromkeys((*groups, *able.values())))}
    found = {task: task._replace(group=narrow[able[task.matrix]]) if task.matrix in able else task for task in tasks}
    owners = assign(list(found.values()), tuple(narrow), load)
    return {(task.matrix, task.group): owners[one.matrix, one.group] for task, one in found.items()}


def spread(tasks: Sequence[Task]) -> Iterator[Task]:
    """Longest first. Each class of equal tasks starts one layer later than the class before it."""
    # Ranks that are even take the tasks of a class in turn, so without the shift the first would get all of layer 0.
    # Neighbours travel in one round, which is over when its last owner is done: that rank would hold up all others.
    ordered = sorted(tasks, key=lambda t: (-t.flops, t.matrix))
    for shift, (_, equal) in enumerate(groupby(ordered, key=lambda t: t.flops)):
        same = list(equal)
        start = shift % len(same)
        yield from same[start:] + same[:start]


def by_group(tasks: Sequence[Task], groups: Groups) -> dict[int, list[Task]]:
    """Tasks by group, large groups first: what only few ranks can own evens out what many share."""
    found: dict[int, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.group, []).append(task)
    return dict(sorted(found.items(), key=lambda item: (-len(groups[item[0]]), item[0])))


STRATEGIES: tuple[Assign, ...] = (balanced, balanced_small_first, balanced_bytes)
"""The ways to choose owners that the search tries."""
