"""From parameters to a plan: who orthogonalizes what, in which buckets, over which groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ..options import MuonOptions, OptionError
from .buckets import home_flops, longest_path, rounds
from .cost import Work
from .exchanges import PATTERNS, Pattern, Pieces
from .groups import Assembly, assemblies
from .layout import Geometries
from .owners import OWNERS, OwnerOf, Task
from .totals import Totals
from .types import Bucket, Matrix, Parameter, Plan

AUTO_BUFFER_BYTES = 4 * 2**30
# A rank sends this in less than a millisecond: smaller buckets would mostly wait for the latency of more calls.
SMALLEST_BUCKET_BYTES = 32 * 2**20
WITHIN_BEST = 1.02
# The guess leaves out how even the owners are, so buffers may well be smaller than it says, but not by more than this.
GUESS_FACTOR = 2
# Geometric: each count is a whole draft to play, and between neighbours buffers change by a third or a half.
BUCKET_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEW_BUCKETS = 4
SLOT_COUNTS = (2, 3, 4, 8)

WorkOf = Callable[[int, int, int], Work]
"""How matrices of (index of the parameter, rows, columns) are orthogonalized."""


def make_plan(parameters: Sequence[Parameter], work_of: WorkOf, options: MuonOptions) -> Plan:
    """The plan of one optimizer step. Deterministic: equal arguments give an equal plan on every rank.

    Raises OptionError for an exchange that is no pattern, for owners that it has no use for, and for buffers too small.
    """
    if options.exchange not in PATTERNS:
        raise OptionError("exchange", f"= {options.exchange!r} is not one of {', '.join(PATTERNS)}")
    if options.owners not in OWNERS and PATTERNS[options.exchange].has_owners:
        raise OptionError("owners", f"= {options.owners!r} needs every piece everywhere: set exchange = 'all_gather'")
    geometries = Geometries(parameters)
    matrices, works = _matrices(parameters, geometries, work_of)
    problem = _divide(parameters, geometries, Pieces(matrices, geometries), options)
    draft = _choose(problem)
    return Plan(tuple(parameters), matrices, problem.home, draft.buckets, draft.slots, options.wire_bytes, works)


def _matrices(
    parameters: Sequence[Parameter], geometries: Geometries, work_of: WorkOf
) -> tuple[tuple[Matrix, ...], tuple[Work, ...]]:
    matrices = []
    works: dict[Work, int] = {}
    for number, parameter in enumerate(parameters):
        for index in range(len(parameter.stack.matrices)):
            rows, cols = geometries[number].shape(index)
            work = work_of(number, rows, cols)
            matrices.append(Matrix(number, index, rows, cols, work.flops, works.setdefault(work, len(works))))
    return tuple(matrices), tuple(works)


@dataclass(frozen=True)
class _Problem:
    """What is to be planned: the ranks that each matrix is at home on with their `load` in FLOPs, and a task of each
    other matrix for each group that assembles it."""

    options: MuonOptions
    pattern: Pattern
    pieces: Pieces
    home: tuple[tuple[int, ...], ...]
    tasks: tuple[Task, ...]
    groups: tuple[tuple[int, ...], ...]
    load: dict[int, int]


def _divide(parameters: Sequence[Parameter], geometries: Geometries, pieces: Pieces, options: MuonOptions) -> _Problem:
    @cache
    def assembled(geometry: int, split: bool) -> tuple[Assembly, ...]:
        return assemblies(geometries.shared[geometry], split)

    pattern = PATTERNS[options.exchange]
    groups: dict[tuple[int, ...], int] = {}
    home: list[tuple[int, ...]] = []
    tasks: list[Task] = []
    for number, matrix in enumerate(pieces.matrices):
        parameter = parameters[matrix.parameter]
        # Replicate promises that copies are equal. A plain tensor promises nothing of the other ranks' ones, which DDP
        # keeps equal and another wrapper may not: so every rank orthogonalizes what it has itself.
        split = pattern.has_owners and not parameter.plain and _splits(matrix, options)
        assembly = assembled(geometries.index[matrix.parameter], split)[matrix.index]
        home.append(assembly.home)
        for ranks in assembly.groups:
            group = groups.setdefault(ranks, len(groups))
            tasks.append(Task(number, group, matrix.flops, matrix.numel * options.wire_bytes, parameter.layer))
    load = home_flops(home, pieces.matrices)
    return _Problem(options, pattern, pieces, tuple(home), tuple(tasks), tuple(groups), load)


def _splits(matrix: Matrix, options: MuonOptions) -> bool:
    """Whether replicas share out this matrix."""
    # It divides the FLOPs by the number of replicas, and costs sending the result to each of them: often between nodes,
    # since that is where HSDP replicates. `auto` weighs the two for one matrix.
    if options.replicas == "auto":
        sent = matrix.numel * options.wire_bytes
        return options.link.compute_seconds(matrix.flops) > options.link.transfer_seconds(sent)
    return options.replicas == "split"


@dataclass(frozen=True)
class _Draft:
    """Buckets that could be the plan's: the FLOPs of their longest path, and a guess at their buffers in bytes."""

    buckets: tuple[Bucket, ...]
    slots: int
    path: int
    guess: int


def _choose(problem: _Problem) -> _Draft:
    """The draft to prefer among those that fit the byte budget. Raises OptionError if none does."""
    wanted = problem.options.buffer_bytes
    budget = AUTO_BUFFER_BYTES if wanted is None else wanted
    sizes, least = _Sizes(problem), math.inf
    # Buffers are counted for the drafts in order of preference until one fits, and not for all: that goes through every
    # piece of every matrix and is most of the planning's time, while a guess costs nothing.
    for candidates in sizes.candidates(budget):
        for draft in _by_preference(_drafts(candidates, sizes, problem)):
            totals = Totals((), draft.buckets, problem.pieces)
            taken = max(totals.buffer_elements(rank, draft.slots) for rank in totals.buckets)
            if taken * problem.options.wire_bytes <= budget:
                return draft
            least = min(least, taken * problem.options.wire_bytes)
    raise OptionError(
        "buffer_bytes",
        f"= {budget} is too small: these matrices take at least {least} bytes of buffers; raise it or use more ranks",
    )


def _by_preference(drafts: Sequence[_Draft]) -> list[_Draft]:
    """Small buffers first among the paths within 2 % of the best; then the others, short paths first."""
    # Not the shortest path alone: from some size on more buffers gain less than the noise of a step, and they are
    # memory that the model could have.
    best = min(draft.path for draft in drafts)
    near = [draft for draft in drafts if draft.path <= WITHIN_BEST * best]
    others = [draft for draft in drafts if draft.path > WITHIN_BEST * best]
    near.sort(key=lambda d: (d.guess, len(d.buckets), d.path))
    return near + sorted(others, key=lambda d: (d.path, d.guess))


def _drafts(candidates: Sequence[tuple[int, int]], sizes: _Sizes, problem: _Problem) -> list[_Draft]:
    drafts = []
    for count, slots in candidates:
        grouped = rounds(problem.tasks, problem.groups, count)
        for owners in _owners(grouped, problem):
            buckets = _buckets(grouped, owners, problem)
            path = longest_path(buckets, problem.pieces.matrices, problem.load, slots)
            drafts.append(_Draft(buckets, slots, path, sizes.buffers(count, slots)))
    return drafts


def _owners(grouped: Sequence[Sequence[Task]], problem: _Problem) -> Iterator[OwnerOf | None]:
    """Every assignment worth trying; None where every rank does all it stores."""
    if not problem.pattern.has_owners:
        yield None
        return
    seen: list[OwnerOf] = []
    for assign in OWNERS[problem.options.owners]:
        owners = assign(grouped, problem.groups, problem.load)
        if owners not in seen:
            seen.append(owners)
            yield owners


def _buckets(grouped: Sequence[Sequence[Task]], owners: OwnerOf | None, problem: _Problem) -> tuple[Bucket, ...]:
    buckets = []
    for number, tasks in enumerate(grouped):
        for group in sorted({task.group for task in tasks}):
            chosen = tuple(task.matrix for task in tasks if task.group == group)
            ranks = () if owners is None else tuple(owners[matrix, group] for matrix in chosen)
            bucket = Bucket(problem.pattern.name, problem.groups[group], chosen, ranks, number)
            buckets.append(problem.pattern.settle(bucket, problem.pieces, problem.options))
    return tuple(buckets)


class _Sizes:
    """Bytes of the tasks, to guess at buffers before owners are known."""

    def __init__(self, problem: _Problem) -> None:
        groups = problem.groups
        total, self._largest, tasks = ([0] * len(groups) for _ in range(3))
        for task in problem.tasks:
            total[task.group] += task.bytes
            self._largest[task.group] = max(self._largest[task.group], task.bytes)
            tasks[task.group] += 1
        everywhere = problem.pattern.gathers_everything
        self._shares = [t if everywhere else t / len(group) for t, group in zip(total, groups, strict=True)]
        self._share = max(self._shares, default=0)
        self._tasks = max(tasks, default=1)
        groups_of: dict[int, list[int]] = {}
        for index, group in enumerate(groups):
            for rank in group:
                groups_of.setdefault(rank, []).append(index)
        self._memberships = {tuple(indices) for indices in groups_of.values()}

    def candidates(self, budget: int) -> Iterator[list[tuple[int, int]]]:
        """Numbers of buckets and slots to try together, until one fits the budget in bytes."""
        # In tiers, since a draft of many buckets takes as long to plan as several of a few, and is rarely needed. First
        # a few large buckets, which have fewest calls and most matrices of a shape to batch; then more and more, up to
        # one for each matrix, for the sake of small buffers; at last buckets that do not overlap, the smallest and
        # slowest. What is far over the budget by the guess is not tried; but the last pair always is, so that the error
        # can say how much would have been enough.
        few = [c for c in range(1, FEW_BUCKETS + 1) if c == 1 or self._share >= c * SMALLEST_BUCKET_BYTES]
        many = [*(c for c in BUCKET_COUNTS if c < self._tasks), self._tasks]
        tiers = [
            list(dict.fromkeys((count, min(slots, count)) for count in few for slots in SLOT_COUNTS)),
            *([(count, min(slots, count)) for slots in SLOT_COUNTS] for count in many),
            *([(count, 1)] for count in many),
        ]
        for tier in tiers:
            if near := [p for p in tier if p == (self._tasks, 1) or self.buffers(*p) <= GUESS_FACTOR * budget]:
                yield near

    def buffers(self, count: int, slots: int) -> int:
        """A guess at the buffers of the busiest rank, in bytes: its pieces, and the matrices it owns."""
        # Buckets are of the same bytes per rank in all groups (buckets.rounds), and hold at least one matrix each.
        stored = [min(share, self._share / count) for share in self._shares]
        taken = [kept + max(kept, largest) for kept, largest in zip(stored, self._largest, strict=True)]
        return int(slots * max((sum(taken[group] for group in groups) for groups in self._memberships), default=0))
