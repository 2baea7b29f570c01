"""The question to a planner, the parts that every answer has, and the answer by a fixed rule."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from ..options import MuonOptions, OptionError
from .layout.intervals import Geometries, Geometry, Pieces, Ranks, components
from .layout.types import Bucket, Matrix, Parameter, Plan
from .layout.work import Elements, Work, WorkOf
from .program.patterns import PATTERNS
from .program.phases import buffer_bytes
from .program.program import make_program


@dataclass(frozen=True)
class PlanRequest:
    """The parameters of a step, equal on every rank.

    `kept`: present state ranks by name, if not all holders.
    """

    parameters: Sequence[Parameter]
    work_of: WorkOf
    options: MuonOptions
    elements: Elements
    kept: Mapping[str, Ranks] = field(default_factory=dict)


Planner = Callable[[PlanRequest], Plan]
"""Equal requests give equal plans. Raises OptionError for options that contradict each other."""


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


class Tasks(NamedTuple):
    """The matrices of a plan by their ranks.

    Attributes:
        local: for each matrix, the ranks that store and orthogonalize all of the matrix.
        tasks: for each remaining matrix, one for each assembling group.
        load: local FLOPs of each rank.
    """

    local: tuple[Ranks, ...]
    tasks: tuple[Task, ...]
    groups: tuple[Ranks, ...]
    load: Mapping[int, int]


def matrices_of(
    parameters: Sequence[Parameter], geometries: Geometries, work_of: WorkOf
) -> tuple[tuple[Matrix, ...], tuple[Work, ...]]:
    """The matrices of all parameters, and their different works."""
    matrices = []
    works: dict[Work, int] = {}
    for number, parameter in enumerate(parameters):
        # A parameter may have hundreds of equal experts.
        work_at: dict[tuple[int, int], tuple[int, int]] = {}
        for index in range(len(parameter.stack.matrices)):
            shape = geometries[number].shape(index)
            if shape not in work_at:
                work = work_of(number, *shape)
                work_at[shape] = work.flops, works.setdefault(work, len(works))
            matrices.append(Matrix(number, index, *shape, *work_at[shape]))
    return tuple(matrices), tuple(works)


@dataclass(frozen=True)
class Assembly:
    """The ranks to orthogonalize a matrix.

    `local`: ranks that store the whole matrix; nothing is sent. `groups`: sets of ranks whose pieces together are the
    matrix. Replicas share one group (`split`), or each has its own (`redundant`).
    """

    local: Ranks
    groups: tuple[Ranks, ...]


def assemblies(geometry: Geometry, split: bool) -> tuple[Assembly, ...]:
    """The Assembly of each matrix. `split`: replicas divide the matrices."""

    def by_replica(ranks: Iterable[int]) -> tuple[Ranks, ...]:
        # The result returns to every replica, and every rank can own: HSDP divides the work by the number of replicas.
        return tuple(tuple(sorted(members)) for members in geometry.by_replica(ranks, joined=split))

    holders = [geometry.elements(index) for index in range(len(geometry.stack.matrices))]
    sets = [by_replica(stored) for stored in holders]
    whole = [
        set(stored.values()) == {prod(geometry.shape(index))} and all(len(ranks) == 1 for ranks in sets[index])
        for index, stored in enumerate(holders)
    ]
    groups = components(ranks for index, of_matrix in enumerate(sets) if not whole[index] for ranks in of_matrix)
    # The whole mesh if it has a single component, or 3 rows over 4 ranks would leave a rank idle. Never join
    # components: experts of different expert-parallel ranks would travel over all ranks.
    for mesh in by_replica(geometry.layout.mesh.ranks):
        if len({groups[rank] for rank in mesh if rank in groups}) == 1:
            groups |= dict.fromkeys(mesh, mesh)
    return tuple(
        Assembly(tuple(stored), ()) if whole[index] else Assembly((), tuple(groups[ranks[0]] for ranks in sets[index]))
        for index, stored in enumerate(holders)
    )


def tasks_of(
    parameters: Sequence[Parameter],
    geometries: Geometries,
    matrices: Sequence[Matrix],
    works: Sequence[Work],
    options: MuonOptions,
) -> Tasks:
    """The ranks that store each matrix whole, or else the groups of ranks that assemble the matrix."""
    groups: dict[Ranks, int] = {}

    @cache
    def placed(geometry: int, split: bool) -> list[tuple[Ranks, list[int]]]:
        """By matrix: local ranks, and numbers of the assembling groups."""
        assembled = assemblies(geometries.shared[geometry], split)
        return [(a.local, [groups.setdefault(ranks, len(groups)) for ranks in a.groups]) for a in assembled]

    split = PATTERNS[options.exchange].has_owners and options.replicas != "redundant"
    local, tasks, load = list[Ranks](), list[Task](), dict[int, int]()
    for number, matrix in enumerate(matrices):
        ranks, assembled_by = placed(geometries.index[matrix.parameter], split)[matrix.index]
        local.append(ranks)
        for rank in ranks:
            load[rank] = load.get(rank, 0) + matrix.flops
        for group in assembled_by:
            work = works[matrix.work]
            size = matrix.numel * work.wire_bytes + work.state_bytes
            tasks.append(Task(number, group, matrix.flops, size, parameters[matrix.parameter].layer))
    return Tasks(tuple(local), tuple(tasks), tuple(groups), load)


def has_replicas(tasks: Sequence[Task], groups: Groups, pieces: Pieces) -> bool:
    """Whether a group has several replicas of a matrix."""
    kinds = {(pieces.kinds[task.matrix], task.group) for task in tasks}
    return any(len(pieces.replicas(kind, groups[group])) > 1 for kind, group in kinds)


def by_group(tasks: Sequence[Task], groups: Groups) -> list[tuple[int, list[Task]]]:
    """Tasks by group, small groups first."""
    by_index: dict[int, list[Task]] = {}
    for task in tasks:
        by_index.setdefault(task.group, []).append(task)
    return sorted(by_index.items(), key=lambda item: (len(groups[item[0]]), -item[0]))


def buckets_of(
    exchange: str,
    rounds: Sequence[Sequence[Task]],
    owners: OwnerOf | None,
    groups: Groups,
    pieces: Pieces,
    works: Sequence[Work],
) -> tuple[Bucket, ...]:
    """The buckets of rounds. `owners`: None if every holder orthogonalizes."""

    @cache
    def falls_back(kind: int, group: int) -> bool:
        return bool(PATTERNS[exchange].fallback(kind, groups[group], pieces))

    buckets = []
    for number, tasks in enumerate(rounds):
        # A collective moves elements of one size.
        alike: dict[tuple[int, int, bool], list[int]] = {}
        for task in tasks:
            wire_bytes = works[pieces.matrices[task.matrix].work].wire_bytes
            key = task.group, wire_bytes, falls_back(pieces.kinds[task.matrix], task.group)
            alike.setdefault(key, []).append(task.matrix)
        for (group, _, all_to_all), listed in sorted(alike.items()):
            ranks = () if owners is None else tuple(owners[matrix, group] for matrix in listed)
            name = "all_to_all" if all_to_all else exchange
            buckets.append(Bucket(name, groups[group], tuple(listed), ranks, number))
    return tuple(buckets)


def in_order(bucket: Bucket, pieces: Pieces, eligible: Mapping[int, Ranks]) -> Bucket:
    """The bucket with its matrices in order, where each owner has neighbours of its matrices of equal cost.

    `eligible`: the possible owners of a matrix, if fewer than the group.
    """
    # Neighbours of a stack with one owner travel as one piece. The cost of each rank stays.
    owners, equal = dict(zip(bucket.matrices, bucket.owners, strict=False)), dict[Hashable, list[int]]()
    for matrix in sorted(bucket.matrices):
        equal.setdefault((pieces.kinds[matrix], eligible.get(matrix)), []).append(matrix)
    for alike in equal.values() if owners else ():
        owners.update(zip(alike, sorted(owners[matrix] for matrix in alike), strict=True))
    matrices = tuple(sorted(bucket.matrices))
    return replace(bucket, matrices=matrices, owners=tuple(owners[matrix] for matrix in matrices if owners))


def separate_reasons(parameters: Sequence[Parameter]) -> Iterator[str]:
    """Notes on names that several tensors have."""
    texts = {
        True: "plain tensors that differ between ranks; each rank orthogonalizes its own",
        False: "separate tensors on separate meshes; each mesh orthogonalizes its own, with momentum on all its ranks",
    }
    for plain, text in texts.items():
        if names := [p.fqn for p in parameters if p.separate and p.plain == plain]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{', '.join(names[:5])}{more}: {text}"


# [Note: the rule], planner = "rule": no machine, no search
# - Owners: longest matrix first, to the least loaded rank; groups of few ranks first.
# - Rounds: about 64 MiB of a rank each, from 2 to 8. Each owner has equally many matrices in each round.
# - Small matrices are first and last, because no computation hides the first gather and the last return. With
#   overlap = "forward" the order is the model's, because forward waits for a round at the first of its layers.
# - Three buffer sets: one gathers, one computes, one returns.
# - Replicas: an owner returns results to its own replica, and replicas all-gather them.

ROUND_BYTES = 64 * 2**20
"""Bytes of a rank in a round."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 8
ROUNDS_IN_FLIGHT = 3


def plan_by_rule(request: PlanRequest) -> Plan:
    """The plan by [Note: the rule]. Raises OptionError for a small `buffer_gib`."""
    options, geometries = request.options, Geometries(request.parameters)
    matrices, works = matrices_of(request.parameters, geometries, request.work_of)
    local, tasks, groups, load = tasks_of(request.parameters, geometries, matrices, works, options)
    pieces, exchange = Pieces(matrices, geometries), str(options.exchange)
    if PATTERNS[exchange].knows_nodes:
        raise OptionError("exchange", f"= {exchange!r} needs the nodes of a machine; set planner = 'search'")
    if exchange == "all_to_all" and has_replicas(tasks, groups, pieces):
        exchange = "hierarchical"
    owners = longest_first(tasks, groups, load) if PATTERNS[exchange].has_owners else None
    rounds = rounds_of(tasks, groups, owners, in_model_order=options.overlap == "forward")
    buckets = buckets_of(exchange, rounds, owners, groups, pieces, works)
    buckets = tuple(in_order(bucket, pieces, {}) for bucket in buckets)
    reasons = ("owners and rounds by a fixed rule (planner = 'rule')", *separate_reasons(request.parameters))
    sets = min(ROUNDS_IN_FLIGHT, max(1, len(rounds)))
    plan = Plan(tuple(request.parameters), matrices, local, buckets, sets, works, "; ".join(reasons))
    _check_buffers(plan, geometries, options)
    return plan


def longest_first(tasks: Sequence[Task], groups: Groups, load: Mapping[int, int]) -> OwnerOf:
    """The owner of each task, on top of each rank's local FLOPs."""
    flops, held, owners = dict(load), dict[int, int](), OwnerOf()
    for index, group_tasks in by_group(tasks, groups):
        heap = [(flops.get(rank, 0), held.get(rank, 0), rank) for rank in groups[index]]
        heapq.heapify(heap)
        for task in sorted(group_tasks, key=lambda task: (-task.flops, task.matrix)):
            before, size, rank = heap[0]
            owners[task.matrix, index] = rank
            flops[rank], held[rank] = before + task.flops, size + task.bytes
            heapq.heapreplace(heap, (flops[rank], held[rank], rank))
    return owners


def rounds_of(
    tasks: Sequence[Task], groups: Groups, owners: OwnerOf | None, *, in_model_order: bool
) -> list[list[Task]]:
    """The tasks of each round. Each owner, or each group without owners, has a queue that the rounds divide."""
    ranks = len({rank for group in groups for rank in group})
    rank_bytes = sum(task.bytes for task in tasks) // max(1, ranks)
    count = max(LEAST_ROUNDS, min(MOST_ROUNDS, rank_bytes // ROUND_BYTES))
    result: list[list[Task]] = [[] for _ in range(count)]

    def queue_of(task: Task) -> tuple[int, int]:
        return task.group, -1 if owners is None else owners[task.matrix, task.group]

    for _, queued in groupby(sorted(tasks, key=lambda task: (*queue_of(task), task.bytes, task.matrix)), key=queue_of):
        queue = list(queued)
        queue = sorted(queue, key=lambda task: task.matrix) if in_model_order else [*queue[::2], *reversed(queue[1::2])]
        for index, task in enumerate(queue):
            result[count * (2 * index + 1) // (2 * len(queue))].append(task)
    return [round_tasks for round_tasks in result if round_tasks]


def _check_buffers(plan: Plan, geometries: Geometries, options: MuonOptions) -> None:
    if options.buffer_bytes is None:
        return
    most = 0
    for rank in sorted({rank for bucket in plan.buckets for rank in bucket.group}):
        runs = [run for run in make_program(plan, rank, geometries).buckets if not run.local]
        buckets = ((run.bucket.round, plan.wire_bytes(run.bucket), run.buffers) for run in runs)
        most = max(most, buffer_bytes(buckets, plan.buffer_sets))
    if most > options.buffer_bytes:
        problem = f"= {options.buffer_gib:.3g} is too small for planner = 'rule', whose buffers take {most / 2**30:.3g}"
        raise OptionError("buffer_gib", f"{problem} GiB; raise it, or set planner = 'search'")
