"""Choice of the matrices to slice, and of the owners of the slices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...options import MuonOptions, OptionError
from ..cost.costs import Costs
from ..exchange.all_gather import PATTERNS
from ..terms.layout import Geometries
from ..terms.pieces import Pieces, Ranks
from ..terms.slices import divides, sliced, slices_of, teams
from ..terms.types import Matrix, Parameter
from ..terms.work import Work, WorkOf
from .owners import Balancer, OwnerOf, Task, by_group, spread
from .problem import Problem

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)
"""A matrix is sliced if its owner would end later than the mean load times a limit."""
GAIN = 0.99
"""The busiest rank must end earlier at least by this factor, else nothing is sliced."""
MUST_SAVE = 0.03
"""`auto` picks slices only if the modelled price falls at least by this share."""
COUNTS = (2, 4, 8)
ALWAYS = -math.inf
"""Sentinel: always slice matrices with an option."""


@dataclass(frozen=True)
class SliceOption:
    """A way to slice a matrix: work and time of one of `count` slices, and possible teams of owners."""

    count: int
    work: Work
    picoseconds: int
    teams: tuple[Ranks, ...]


SliceOptions = dict[tuple[int, int], tuple[SliceOption, ...]]
"""By (matrix, group)."""


@dataclass(frozen=True)
class TeamChoice:
    """An option for a team of ranks."""

    end: int  # Of the last rank.
    option: SliceOption
    ranks: Ranks


@dataclass(frozen=True)
class Balance:
    """Ranks for all tasks of a problem.

    Attributes:
        owners: the owner of each task, or its team.
        longest: end of the busiest rank.
        latest: latest end of a task that could be sliced, if it stayed whole.
    """

    owners: tuple[Ranks, ...]
    longest: int
    latest: int


def check_split_over(options: MuonOptions) -> None:
    """Raise OptionError if the options ask for slices but exclude several owners."""
    fault = slices_fault(options)
    if fault and options.split_over not in (1, "auto"):
        raise OptionError("split_over", f"= {options.split_over}: {fault}, or split_over = 1")


def slices_fault(options: MuonOptions) -> str:
    """The reason against several owners of a matrix, with the remedy; empty if possible."""
    if options.orthogonalize == "reference":
        return "orthogonalize = 'reference' is of whole matrices; choose 'auto'"
    if not PATTERNS[options.exchange].has_owners:
        return f"exchange = {options.exchange!r} has no owners; choose 'all_to_all'"
    if options.state == "owner":
        return "state = 'owner' keeps a matrix's momentum for one rank; choose 'replicated'"
    return ""


def with_cuts(problem: Problem, work_of: WorkOf) -> Problem | None:
    """The problem with late matrices sliced, or None if no slicing ends the step earlier."""
    if problem.options.split_over == 1 or slices_fault(problem.options):
        return None
    choices = _slice_options(problem, work_of)
    if not choices:
        return None
    tasks = timed(problem)
    load = loads(problem)
    mean = (sum(task.flops for task in tasks) + sum(load.values())) / len(problem.costs.pieces.ranks())
    for small_first in (False, True) if len(problem.groups) > 1 else (False,):
        whole = balance(problem, tasks, load, choices, math.inf, small_first=small_first)
        limits = [limit * mean for limit in (LIMITS[:1] if small_first else LIMITS) if limit * mean < whole.latest]
        balances = [balance(problem, tasks, load, choices, limit, small_first=small_first) for limit in limits]
        best = min(balances, key=lambda b: b.longest, default=whole)
        if best.longest < GAIN * whole.longest:
            return cut(problem, choices, best)
    return None


def slices_reason(problem: Problem) -> str:
    """Note for the user: the number of sliced matrices, or the reason for none; empty if slices are off."""
    cut = sum(matrix.slice is not None and matrix.slice.place == 0 for matrix in problem.costs.pieces.matrices)
    if cut:
        return f"matrices in slices: {cut:,}"
    options = problem.options
    if options.split_over == 1:
        return ""
    sooner = f"would save {MUST_SAVE:.0%} of the step" if options.split_over == "auto" else "would end the step sooner"
    return f"no matrix in slices: {slices_fault(options) or f'none {sooner}'}"


def timed(problem: Problem) -> list[Task]:
    """Tasks with picoseconds instead of FLOPs, to include traffic between the owners of slices."""
    costs = problem.costs
    times = [picoseconds(costs, matrix, costs.works[matrix.work]) for matrix in costs.pieces.matrices]
    return [task._replace(flops=times[task.matrix]) for task in problem.tasks]


def picoseconds(costs: Costs, matrix: Matrix, work: Work) -> int:
    """Time as an integer, so that all ranks compute equal sums."""
    return int(1e12 * costs.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), 1))


def loads(problem: Problem) -> dict[int, int]:
    """Picoseconds of each rank's local matrices."""
    local = zip(problem.costs.pieces.ranks(), problem.costs.local(problem.local), strict=True)
    return {rank: int(1e12 * owned.seconds) for rank, owned in local}


def _slice_options(problem: Problem, work_of: WorkOf) -> SliceOptions:
    # Each of several groups that repeat the work would need slices.
    groups = Counter(task.matrix for task in problem.tasks)
    most = problem.options.split_over
    counts = [count for count in COUNTS if most == "auto" or count <= most]
    possible = [
        [count for count in counts if teams(group, count, problem.costs.machine.ranks_per_node)]
        for group in problem.groups
    ]
    tasks = (task for task in problem.tasks if possible[task.group] and groups[task.matrix] == 1)
    return options_of(
        problem, tasks, lambda task: _options_of_matrix(problem, task.matrix, task.group, possible[task.group], work_of)
    )


def options_of(problem: Problem, tasks: Iterable[Task], make: Callable[[Task], Sequence[SliceOption]]) -> SliceOptions:
    """The options of these tasks, made once for equal tasks."""
    choices, known = SliceOptions(), dict[tuple[int, int], tuple[SliceOption, ...]]()
    for task in tasks:
        kind = problem.costs.pieces.kinds[task.matrix], task.group
        if kind not in known:
            known[kind] = tuple(make(task))
        if known[kind]:
            choices[task.matrix, task.group] = known[kind]
    return choices


def _options_of_matrix(
    problem: Problem, number: int, group: int, counts: Sequence[int], work_of: WorkOf
) -> list[SliceOption]:
    costs, matrix = problem.costs, problem.costs.pieces.matrices[number]
    stored, shape = problem.parameters[matrix.parameter].stack.matrices[matrix.index], (matrix.rows, matrix.cols)
    result, whole = [], picoseconds(costs, matrix, costs.works[matrix.work])
    for count in counts:
        if divides(stored, shape, count):
            work = work_of(matrix.parameter, *shape, count)
            slice_time = picoseconds(costs, slices_of(matrix, 0, 0, 0, count)[0], work)
            sets = teams(problem.groups[group], count, costs.machine.ranks_per_node)
            result += [SliceOption(count, work, slice_time, tuple(sets))] if slice_time < whole else []
    return result


def balance(
    problem: Problem,
    tasks: Sequence[Task],
    load: Mapping[int, int],
    choices: SliceOptions,
    limit: float,
    *,
    small_first: bool = False,
) -> Balance:
    """Like `balanced`, but a matrix that would end after `limit` is sliced if the slices end earlier."""
    balancer = Balancer(tasks, problem.costs.pieces.ranks(), load)
    owners: dict[tuple[int, int], Ranks] = {}
    latest = 0
    grouped = by_group(tasks, problem.groups)
    for index in reversed(grouped) if small_first else grouped:
        group, group_tasks = problem.groups[index], grouped[index]
        heap = balancer.heap(group)
        for task in spread(group_tasks):
            available, end = choices.get((task.matrix, index), ()), heap[0][0] + task.flops
            latest = max(latest, end) if available else latest
            shared = _shared(balancer, available, limit) if end > limit else None
            if shared is None or (shared.end >= end and limit > ALWAYS):
                owners[task.matrix, index] = (balancer.assign(task, heap),)
                continue
            for rank in shared.ranks:
                time, size = shared.option.picoseconds, task.bytes // shared.option.count
                balancer.add_work(task._replace(flops=time, bytes=size), rank)
            # The entries of these ranks are outdated.
            heap = balancer.heap(group)
            owners[task.matrix, index] = shared.ranks
    return Balance(tuple(owners[task.matrix, task.group] for task in tasks), balancer.longest(), latest)


def _shared(balancer: Balancer, choices: Sequence[SliceOption], limit: float) -> TeamChoice | None:
    """The fewest slices that end by `limit`, or else the first to end."""
    shares = [TeamChoice(balancer.latest_end(ranks) + o.picoseconds, o, ranks) for o in choices for ranks in o.teams]
    return min(shares, key=lambda share: (max(share.end, limit), share.option.count, share.end), default=None)


def cut(problem: Problem, choices: SliceOptions, shared: Balance) -> Problem:
    """The problem with slices."""
    chosen = {
        task.matrix: next(option for option in choices[task.matrix, task.group] if option.count == len(ranks))
        for task, ranks in zip(problem.tasks, shared.owners, strict=True)
        if len(ranks) > 1
    }
    costs = problem.costs
    matrices, works, first = _renumbered(costs, chosen)
    parameters = _parameters(problem, chosen)
    tasks, owners = list[Task](), OwnerOf()
    for task, ranks in zip(problem.tasks, shared.owners, strict=True):
        for number, rank in enumerate(ranks, start=first[task.matrix]):
            matrix = matrices[number]
            tasks.append(Task(number, task.group, matrix.flops, matrix.numel * costs.wire_bytes, task.layer))
            owners[number, task.group] = rank
    counts = [1 if number not in chosen else chosen[number].count for number in range(len(problem.local))]
    local = [ranks for ranks, count in zip(problem.local, counts, strict=True) for _ in range(count)]
    pieces = Pieces(matrices, Geometries(parameters), costs.pieces.ranks_per_node)
    return replace(
        problem,
        parameters=parameters,
        costs=Costs(pieces, works, costs.wire_bytes, costs.machine, costs.elementwise),
        local=tuple(local),
        tasks=tuple(tasks),
        owners=owners,
    )


def _renumbered(
    costs: Costs, chosen: Mapping[int, SliceOption]
) -> tuple[tuple[Matrix, ...], tuple[Work, ...], list[int]]:
    """Matrices after slicing, works, and the first new number of each matrix."""
    result: list[Matrix] = []
    works: dict[Work, int] = {}
    first, index = [], 0
    for number, matrix in enumerate(costs.pieces.matrices):
        index = 0 if matrix.index == 0 else index
        first.append(len(result))
        option = chosen.get(number)
        work = costs.works[matrix.work] if option is None else option.work
        place = works.setdefault(work, len(works))
        if option is not None:
            result += slices_of(matrix, index, place, work.flops, option.count)
        else:
            result.append(replace(matrix, index=index, work=place))
        index += 1 if option is None else option.count
    return tuple(result), tuple(works), first


def _parameters(problem: Problem, chosen: Mapping[int, SliceOption]) -> tuple[Parameter, ...]:
    counts: dict[int, dict[int, int]] = {}
    for number, option in chosen.items():
        matrix = problem.costs.pieces.matrices[number]
        counts.setdefault(matrix.parameter, {})[matrix.index] = option.count
    return tuple(
        sliced(parameter, counts[number]) if number in counts else parameter
        for number, parameter in enumerate(problem.parameters)
    )
