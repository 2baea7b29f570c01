"""The matrices to assign to owners, the owner of each, and with `state = "owner"` the keepers of its momentum."""

# Every rank computes the owners: deterministic, with ties to the lowest rank.

# [Note: state ranks]
# - A single replica (a rank, or under HSDP all ranks that shard the parameter) keeps the momentum, placed like the
#   parameter, so that a checkpoint contains the momentum once and loads under any placement.
# - The owner of a matrix is a rank of this replica, because the owner needs all of the matrix's momentum.
# - Several ranks keep the momentum of a stack of experts whole on each rank, in chunks of experts like torch.chunk, to
#   balance memory.

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, groupby
from math import prod

from ..engine.layout.intervals import Geometries, Geometry, Ranks, chunk
from ..engine.layout.types import Layout, Matrix, Parameter, Plan, Replicate
from ..engine.layout.work import WorkOf
from ..engine.planning import Groups, OwnerOf, Task, Tasks, by_group
from ..engine.program.two_hops import owning_ranks
from ..options import MuonOptions

BYTES_OVER_MEAN = 1.3
"""Most bytes of a rank, relative to the mean."""


def with_state_ranks(
    parameters: Sequence[Parameter], options: MuonOptions, work_of: WorkOf, kept: Mapping[str, Ranks]
) -> list[Parameter]:
    """Parameters with state ranks: for each the replica with the least FLOPs, within a limit of elements.

    `kept`: present ranks by name, which cannot move.
    """
    if options.state == "replicated":
        return list(parameters)
    geometries, result = Geometries(parameters), list(parameters)
    costs: dict[int, tuple[int, int, tuple[Ranks, ...]]] = {}
    for number, parameter in enumerate(parameters):
        geometry = geometries[number]
        replicas = geometry.by_replica(geometry.layout.mesh.ranks)
        if not parameter.separate and len(replicas) > 1:
            shapes = Counter(map(geometry.shape, range(len(parameter.stack.matrices))))
            work = sum(count * work_of(number, *shape).flops for shape, count in shapes.items())
            costs[number] = work, prod(parameter.layout.shape), replicas
    every = sorted({rank for geometry in geometries.shared for rank in geometry.layout.mesh.ranks})
    most = BYTES_OVER_MEAN * sum(size for _, size, _ in costs.values()) / max(1, len(every))
    flops, elements = dict.fromkeys(every, 0), dict.fromkeys(every, 0)

    def load(ranks: Ranks, more: int) -> tuple[bool, int, int]:
        held = sum(elements[rank] for rank in ranks)
        return held + more > most * len(ranks), sum(flops[rank] for rank in ranks), held

    for number in sorted(costs, key=lambda n: (parameters[n].fqn not in kept, -costs[n][0], -costs[n][1], n)):
        parameter, (work, size, replicas) = parameters[number], costs[number]
        shape, whole, present = parameter.layout.shape, _is_whole(parameter.layout), kept.get(parameter.fqn)
        # Separable parts along dim 0.
        units = shape[0] if parameter.stack.is_separable(shape) else 1
        count = min(units, len(replicas)) if whole else 1
        shares = [stop - start for start, stop in (chunk(units, count, n) for n in range(count)) if stop > start]
        if present is None:
            lightest = partial(load, more=size * shares[0] // units)
            chosen = heapq.nsmallest(len(shares), replicas, key=lightest)
        else:
            chosen = [(rank,) for rank in present] if whole else [present]
        for ranks, share in zip(chosen, shares, strict=True):
            for rank in ranks:
                flops[rank] += work * share // (units * len(ranks))
                elements[rank] += size * share // (units * len(ranks))
        result[number] = replace(parameter, state_ranks=tuple(chain.from_iterable(chosen)))
    return result


def _is_whole(layout: Layout) -> bool:
    """Whether every rank of the mesh has all of the parameter."""
    return all(isinstance(placement, Replicate) for placement in layout.placements)


def momentum_ranks(parameter: Parameter, index: int) -> Ranks:
    """The possible owners of matrix number `index` by its momentum; empty if every holder keeps momentum."""
    kept = parameter.state_ranks
    if len(kept) < 2 or not _is_whole(parameter.layout):
        return kept
    shape, stack = parameter.layout.shape, parameter.stack
    unit = stack.matrices[index].rows[0].start // prod(shape[1 : stack.row_dims])
    return (kept[unit // chunk(shape[0], len(kept), 0).stop],)


def state_totals(plan: Plan, geometries: Geometries) -> Counter[int]:
    """Elements of momentum by rank."""
    totals, states = Counter[int](), zip(geometries.index, [p.state_ranks for p in plan.parameters], strict=True)
    for (index, kept), count in Counter(states).items():
        geometry = geometries.shared[index]
        for rank in geometry.layout.mesh.ranks:
            totals[rank] += count * state_elements(geometry, kept, rank)
    return totals


def state_elements(geometry: Geometry, kept: Ranks, rank: int) -> int:
    """Elements of a parameter's momentum on a rank of its mesh. `kept`: the parameter's state ranks."""
    stored = prod(geometry.local_shape(rank))
    if kept and rank not in kept:
        return 0
    if not kept or not _is_whole(geometry.layout):
        return stored
    first = geometry.layout.shape[0]
    start, stop = chunk(first, len(kept), kept.index(rank))
    return stored * (stop - start) // first


Assign = Callable[[Sequence[Task], Groups, Mapping[int, int]], OwnerOf]
Heap = list[tuple[int, int, int]]
"""(FLOPs, bytes, rank) of the ranks of a group, least loaded first."""


def eligible_owners(parameters: Sequence[Parameter], matrices: Sequence[Matrix], given: Tasks) -> dict[int, Ranks]:
    """The possible owners of each matrix, if fewer than the group."""

    @cache
    def inside(ranks: Ranks, group: int) -> Ranks:
        return tuple(sorted({*ranks} & {*given.groups[group]}))

    eligible = {}
    for task in given.tasks:
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


def balanced(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int], *, small_first: bool = True) -> OwnerOf:
    """Assign longest first, on top of each rank's local FLOPs; groups of few ranks first, or groups of many.

    For a single group of all ranks, the busiest rank is within 4/3 of the optimum (Graham, 1969).
    """
    balancer = Balancer(tasks, (rank for group in groups for rank in group), load)
    owners: OwnerOf = {}
    grouped = by_group(tasks, groups)
    for index, group_tasks in grouped if small_first else reversed(grouped):
        heap = balancer.heap(groups[index])
        owners |= {(task.matrix, index): balancer.assign(task, heap) for task in spread(group_tasks)}
    return owners


def balanced_bytes(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """Like `balanced` with groups of many ranks first, by bytes, for links slower than Newton-Schulz."""
    return balanced([task._replace(flops=task.bytes) for task in tasks], groups, {}, small_first=False)


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


def across_nodes(assign: Assign, ranks_per_node: int) -> Assign:
    """Like `assign`, but ties go to another node first, and ranks of a node with missing ranks own nothing."""

    # A few owners side by side would share the network links of a few nodes. With the same local index on every node
    # they would be in few expert-parallel groups, so each node starts at another one: by the digit sum of its number.
    def turn(rank: int) -> tuple[int, int]:
        node, digits = rank // ranks_per_node, 0
        while node:
            node, digit = divmod(node, max(2, ranks_per_node))
            digits += digit
        return (rank - digits) % ranks_per_node, rank

    def assigned(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
        ranks = sorted({*load, *(rank for group in groups for rank in group)}, key=turn)
        place = {rank: index for index, rank in enumerate(ranks)}
        placed = [tuple(sorted(place[rank] for rank in owning_ranks(group, ranks_per_node))) for group in groups]
        owners = assign(tasks, placed, {place[rank]: flops for rank, flops in load.items()})
        return {key: ranks[owner] for key, owner in owners.items()}

    return assigned


def spread(tasks: Sequence[Task]) -> Iterator[Task]:
    """Assign longest first; each class of equal tasks starts one layer later than the previous class."""
    # Ranks take the tasks of a class in turn: without the shift the first rank would get all of layer 0, in one round.
    ordered = sorted(tasks, key=lambda t: (-t.flops, t.matrix))
    for shift, (_, equal) in enumerate(groupby(ordered, key=lambda t: t.flops)):
        same = list(equal)
        start = shift % len(same)
        yield from same[start:] + same[:start]


# The last groups even out the load: large groups with large matrices, or small groups with large loads.
STRATEGIES: tuple[Assign, ...] = (partial(balanced, small_first=False), balanced, balanced_bytes)
