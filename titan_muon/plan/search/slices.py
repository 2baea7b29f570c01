"""Sliced matrices: several ranks of a node orthogonalize a matrix together. The choice of matrices and of owners."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from ...options import MuonOptions, OptionError
from ..cost.walk import Costs
from ..exchange.patterns import PATTERNS
from ..terms.layout import Geometries, select
from ..terms.machine import Work, WorkOf
from ..terms.pieces import Pieces, Ranks
from ..terms.types import Interval, Matrix, MatrixRows, Parameter, Slice
from .owners import Balancer, OwnerOf, Problem, Task, by_group, spread

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


def slices_reason(problem: Problem) -> str:
    """Note for the user: the number of sliced matrices, or the reason for none."""
    sliced = sum(matrix.slice is not None and matrix.slice.place == 0 for matrix in problem.costs.pieces.matrices)
    if sliced:
        return f"matrices in slices: {sliced:,}"
    options = problem.options
    sooner = f"would save {MUST_SAVE:.0%} of the step" if options.split_over == "auto" else "would end the step sooner"
    return f"no matrix in slices: {slices_fault(options) or f'none {sooner}'}"


def with_slices(problem: Problem, work_of: WorkOf) -> Problem | None:
    """The problem with late matrices sliced, or None if no slicing ends the step earlier."""
    options, per_node = problem.options, problem.costs.machine.ranks_per_node
    if slices_fault(options):
        return None
    counts = [count for count in COUNTS if options.split_over == "auto" or count <= options.split_over]
    teams = [{count: _teams(group, count, per_node) for count in counts} for group in problem.groups]
    # Each of several groups that repeat the work would need slices.
    groups = Counter(task.matrix for task in problem.tasks)
    tasks = (task for task in problem.tasks if groups[task.matrix] == 1)
    choices = options_of(problem, tasks, lambda task: _options_of(problem, task.matrix, teams[task.group], work_of))
    if not choices:
        return None
    timed, load = in_picoseconds(problem)
    mean = (sum(task.flops for task in timed) + sum(load.values())) / len(problem.costs.pieces.ranks())
    whole = balance(problem, timed, load, choices, math.inf)
    limits = [limit * mean for limit in LIMITS if limit * mean < whole.latest]
    balances = [balance(problem, timed, load, choices, limit) for limit in limits]
    best = min(balances, key=lambda b: b.longest, default=whole)
    return cut(problem, choices, best) if best.longest < GAIN * whole.longest else None


def in_picoseconds(problem: Problem) -> tuple[list[Task], dict[int, int]]:
    """Tasks with picoseconds instead of FLOPs, to include traffic between owners, and those of local matrices."""
    costs, pieces = problem.costs, problem.costs.pieces
    times = [
        picoseconds(costs, matrix, costs.works[matrix.work])
        for matrix in map(pieces.matrices.__getitem__, pieces.examples)
    ]
    tasks = [task._replace(flops=times[pieces.kinds[task.matrix]]) for task in problem.tasks]
    local = zip(pieces.ranks(), costs.local(problem.local), strict=True)
    return tasks, {rank: int(1e12 * owned.seconds) for rank, owned in local}


def picoseconds(costs: Costs, matrix: Matrix, work: Work) -> int:
    """Time as an integer, so that all ranks compute equal sums."""
    return int(1e12 * costs.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), 1))


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


def _teams(group: Ranks, count: int, ranks_per_node: int) -> tuple[Ranks, ...]:
    """Disjoint sets of `count` ranks of a node: few, because each needs a process group."""
    nodes = [tuple(members) for _, members in groupby(group, key=lambda rank: rank // ranks_per_node)]
    return tuple(node[n : n + count] for node in nodes for n in range(0, len(node) - count + 1, count))


def _options_of(
    problem: Problem, number: int, teams: Mapping[int, tuple[Ranks, ...]], work_of: WorkOf
) -> list[SliceOption]:
    costs, matrix = problem.costs, problem.costs.pieces.matrices[number]
    result, whole = [], picoseconds(costs, matrix, costs.works[matrix.work])
    for count, sets in teams.items():
        if sets and divides(problem, number, count):
            option = slice_option(problem, number, count, sets, work_of)
            result += [option] if option.picoseconds < whole else []
    return result


def divides(problem: Problem, number: int, count: int) -> bool:
    """Whether the matrix divides into `count` equal slices, and the Gram matrix into equal row blocks."""
    matrix = problem.costs.pieces.matrices[number]
    stored = problem.parameters[matrix.parameter].stack.matrices[matrix.index]
    # An interleaved matrix would need as many segments as rows.
    return stored.row_step == stored.col_step == 1 and matrix.rows % count == matrix.cols % count == 0


def slice_option(problem: Problem, number: int, count: int, teams: tuple[Ranks, ...], work_of: WorkOf) -> SliceOption:
    """The option of `count` slices of matrix `number`."""
    costs, matrix = problem.costs, problem.costs.pieces.matrices[number]
    work = work_of(matrix.parameter, matrix.rows, matrix.cols, count)
    return SliceOption(count, work, picoseconds(costs, _slices_of(matrix, 0, 0, 0, count)[0], work), teams)


def balance(
    problem: Problem, tasks: Sequence[Task], load: Mapping[int, int], choices: SliceOptions, limit: float
) -> Balance:
    """Like `balanced`, but a matrix that would end after `limit` is sliced if the slices end earlier."""
    balancer = Balancer(tasks, problem.costs.pieces.ranks(), load)
    owners: dict[tuple[int, int], Ranks] = {}
    latest = 0
    for index, group_tasks in by_group(tasks, problem.groups):
        heap = balancer.heap(problem.groups[index])
        for task in spread(group_tasks):
            available, end = choices.get((task.matrix, index), ()), heap[0][0] + task.flops
            latest = max(latest, end) if available else latest
            shares = [
                (balancer.latest_end(team) + option.picoseconds, option, team)
                for option in (available if end > limit else ())
                for team in option.teams
            ]
            # The fewest slices that end by `limit`, or else the first to end.
            shared = min(shares, key=lambda share: (max(share[0], limit), share[1].count, share[0]), default=None)
            if shared is None or (shared[0] >= end and limit > ALWAYS):
                owners[task.matrix, index] = (balancer.assign(task, heap),)
                continue
            _, option, team = shared
            for rank in team:
                balancer.add_work(task._replace(flops=option.picoseconds, bytes=task.bytes // option.count), rank)
            # The entries of these ranks are outdated.
            heap = balancer.heap(problem.groups[index])
            owners[task.matrix, index] = team
    return Balance(tuple(owners[task.matrix, task.group] for task in tasks), balancer.longest(), latest)


def cut(problem: Problem, choices: SliceOptions, shared: Balance) -> Problem:
    """The problem with slices."""
    chosen = {
        task.matrix: next(option for option in choices[task.matrix, task.group] if option.count == len(ranks))
        for task, ranks in zip(problem.tasks, shared.owners, strict=True)
        if len(ranks) > 1
    }
    costs, works, first = problem.costs, dict[Work, int](), list[int]()
    matrices, local = list[Matrix](), list[Ranks]()
    slice_counts: dict[int, dict[int, int]] = {}
    for number, matrix in enumerate(costs.pieces.matrices):
        option, index = chosen.get(number), matrices[-1].index + 1 if matrix.index else 0
        first.append(len(matrices))
        if option is None:
            place = works.setdefault(costs.works[matrix.work], len(works))
            matrices.append(replace(matrix, index=index, work=place))
        else:
            place = works.setdefault(option.work, len(works))
            matrices += _slices_of(matrix, index, place, option.work.flops, option.count)
            slice_counts.setdefault(matrix.parameter, {})[matrix.index] = option.count
        local += [problem.local[number]] * (len(matrices) - first[-1])
    tasks, owners = list[Task](), OwnerOf()
    for task, ranks in zip(problem.tasks, shared.owners, strict=True):
        for number, rank in enumerate(ranks, start=first[task.matrix]):
            matrix = matrices[number]
            size = matrix.numel * costs.wire_bytes(task.matrix)
            tasks.append(Task(number, task.group, matrix.flops, size, task.layer))
            owners[number, task.group] = rank
    parameters = tuple(_sliced(p, slice_counts.get(number, {})) for number, p in enumerate(problem.parameters))
    pieces = Pieces(matrices, Geometries(parameters), costs.pieces.ranks_per_node)
    return replace(
        problem,
        parameters=parameters,
        costs=Costs(pieces, tuple(works), costs.machine, costs.elementwise),
        local=tuple(local),
        tasks=tuple(tasks),
        owners=owners,
    )


def _cuts_rows(shape: tuple[int, int]) -> bool:
    """Whether rows are cut: always the longer side, because each slice needs all of the shorter side."""
    return shape[0] >= shape[1]


def _slices_of(matrix: Matrix, index: int, work: int, flops: int, count: int) -> list[Matrix]:
    """The slices; `index`: of the first slice in the parameter's stack."""
    cuts_rows = _cuts_rows((matrix.rows, matrix.cols))
    rows, cols = (matrix.rows // count, matrix.cols) if cuts_rows else (matrix.rows, matrix.cols // count)
    return [
        Matrix(matrix.parameter, index + place, rows, cols, flops, work, Slice(place, count, cuts_rows))
        for place in range(count)
    ]


def _sliced(parameter: Parameter, counts: Mapping[int, int]) -> Parameter:
    """The parameter with matrix i of the stack cut into `counts[i]` slices."""
    stack, cols = parameter.stack, prod(parameter.layout.shape[parameter.stack.row_dims :])
    matrices: list[MatrixRows] = []
    for index, matrix in enumerate(stack.matrices):
        count = counts.get(index, 1)
        matrices += [_part(matrix, cols, place, count) for place in range(count)] if count > 1 else [matrix]
    return replace(parameter, stack=replace(stack, matrices=tuple(matrices)))


def _part(matrix: MatrixRows, col_count: int, place: int, count: int) -> MatrixRows:
    shape, label = matrix.shape(col_count), f"{matrix.label}/{place}"
    if _cuts_rows(shape):
        length = shape[0] // count
        return replace(matrix, label=label, rows=select(matrix.rows, place * length, (place + 1) * length))
    length, cols = shape[1] // count, matrix.cols or (Interval(0, shape[1]),)
    return replace(matrix, label=label, cols=select(cols, place * length, (place + 1) * length))
