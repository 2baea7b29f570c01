"""The matrices to assign to owners, and the owner of each."""

# Every rank computes the owners: deterministic, with ties to the lowest rank.

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

from ...options import MuonOptions
from ..cost.walk import Costs
from ..exchange.patterns import PATTERNS, Pattern
from ..terms.layout import Geometries
from ..terms.pieces import Ranks, assemblies
from ..terms.types import Matrix, Parameter
from .state import BYTES_OVER_MEAN, momentum_ranks


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


@dataclass(frozen=True)
class Problem:
    """Matrices to assign to owners, and costs to judge a plan.

    Attributes:
        local: for each matrix, the ranks that store and orthogonalize all of the matrix.
        tasks: for each remaining matrix, one for each assembling group.
        load: local FLOPs of each rank.
        eligible: possible owners of a matrix, if fewer than the group.
        owners: fixed, for slices and tensor-parallel groups.
    """

    parameters: tuple[Parameter, ...]
    options: MuonOptions
    pattern: Pattern
    costs: Costs
    local: tuple[Ranks, ...]
    tasks: tuple[Task, ...]
    groups: tuple[Ranks, ...]
    load: Mapping[int, int]
    eligible: Mapping[int, Ranks]
    owners: OwnerOf | None = None


def make_problem(
    parameters: Sequence[Parameter], geometries: Geometries, options: MuonOptions, costs: Costs
) -> Problem:
    """The problem of whole matrices."""
    groups: dict[Ranks, int] = {}

    @cache
    def placed(geometry: int, split: bool) -> list[tuple[Ranks, list[int]]]:
        """By matrix: local ranks, and numbers of the assembling groups."""
        assembled = assemblies(geometries.shared[geometry], split)
        return [(a.local, [groups.setdefault(ranks, len(groups)) for ranks in a.groups]) for a in assembled]

    pattern, matrices = PATTERNS[options.exchange], costs.pieces.matrices
    local: list[Ranks] = []
    tasks: list[Task] = []
    load: dict[int, int] = {}
    for number, matrix in enumerate(matrices):
        parameter = parameters[matrix.parameter]
        split = pattern.has_owners and options.replicas != "redundant"
        ranks, assembled_by = placed(geometries.index[matrix.parameter], split)[matrix.index]
        local.append(ranks)
        for rank in ranks:
            load[rank] = load.get(rank, 0) + matrix.flops
        for group in assembled_by:
            tasks.append(Task(number, group, matrix.flops, matrix.numel * options.wire_bytes, parameter.layer))
    eligible = _eligible(parameters, matrices, tasks, tuple(groups))
    return Problem(
        tuple(parameters), options, pattern, costs, tuple(local), tuple(tasks), tuple(groups), load, eligible
    )


def _eligible(
    parameters: Sequence[Parameter], matrices: Sequence[Matrix], tasks: Sequence[Task], groups: Sequence[Ranks]
) -> dict[int, Ranks]:
    @cache
    def inside(ranks: Ranks, group: int) -> Ranks:
        return tuple(sorted({*ranks} & {*groups[group]}))

    eligible = {}
    for task in tasks:
        matrix = matrices[task.matrix]
        if ranks := momentum_ranks(parameters[matrix.parameter], matrix.index):
            eligible[task.matrix] = inside(ranks, task.group)
    return eligible


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


def balanced(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """Assign longest first, on top of each rank's local FLOPs; groups of few ranks first.

    For a single group of all ranks, the busiest rank is within 4/3 of the optimum (Graham, 1969).
    """
    balancer = Balancer(tasks, (rank for group in groups for rank in group), load)
    owners: OwnerOf = {}
    for index, group_tasks in by_group(tasks, groups):
        heap = balancer.heap(groups[index])
        owners |= {(task.matrix, index): balancer.assign(task, heap) for task in spread(group_tasks)}
    return owners


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


def by_group(tasks: Sequence[Task], groups: Groups) -> list[tuple[int, list[Task]]]:
    """Tasks by group, small groups first, so that large matrices of large groups even out the load."""
    by_index: dict[int, list[Task]] = {}
    for task in tasks:
        by_index.setdefault(task.group, []).append(task)
    return sorted(by_index.items(), key=lambda item: (len(groups[item[0]]), -item[0]))


STRATEGIES: tuple[Assign, ...] = (balanced, balanced_bytes)
