"""The plan by a fixed rule: no machine, no search. `planner = "rule"`."""

# [Note: the rule]
# - Owners: longest matrix first, to the least loaded rank; groups of few ranks first.
# - Rounds: about 64 MiB of a rank each, from 2 to 8. Each owner has equally many matrices in each round.
# - Small matrices are first and last, because no computation hides the first gather and the last return. With
#   overlap = "forward" the order is the model's, because forward waits for a round at the first of its layers.
# - Three buffer sets: one gathers, one computes, one returns.
# - Replicas: an owner returns results to its own replica, and replicas all-gather them.

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import groupby

from ..options import MuonOptions, OptionError
from .layout.intervals import Geometries, Pieces
from .layout.types import Bucket, Plan
from .layout.work import Work
from .planning import (
    Groups,
    OwnerOf,
    PlanRequest,
    Task,
    buckets_of,
    by_group,
    has_replicas,
    in_order,
    matrices_of,
    separate_reasons,
    tasks_of,
)
from .program.patterns import PATTERNS
from .program.phases import buffer_bytes

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
    _check_buffers(buckets, pieces, works, options)
    reasons = ("owners and rounds by a fixed rule (planner = 'rule')", *separate_reasons(request.parameters))
    sets = min(ROUNDS_IN_FLIGHT, max(1, len(rounds)))
    return Plan(tuple(request.parameters), matrices, local, buckets, sets, works, "; ".join(reasons))


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


def _check_buffers(buckets: Sequence[Bucket], pieces: Pieces, works: Sequence[Work], options: MuonOptions) -> None:
    if options.buffer_bytes is None:
        return
    by_rank: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
    for bucket in buckets:
        wire_bytes = works[pieces.matrices[bucket.matrices[0]].work].wire_bytes
        for rank, totals in PATTERNS[bucket.exchange].totals(bucket, pieces).items():
            by_rank.setdefault(rank, []).append((bucket.round, wire_bytes, totals.buffers))
    most = max((buffer_bytes(held, ROUNDS_IN_FLIGHT) for held in by_rank.values()), default=0)
    if most > options.buffer_bytes:
        problem = f"= {options.buffer_gib:.3g} is too small for planner = 'rule', whose buffers take {most / 2**30:.3g}"
        raise OptionError("buffer_gib", f"{problem} GiB; raise it, or set planner = 'search'")
