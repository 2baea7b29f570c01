"""From parameters to a plan: who orthogonalizes what, in which buckets, over which groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from ..options import MuonOptions, OptionError
from .cost.times import Costs
from .exchange.all_gather import PATTERNS
from .search.over_replicas import copies_reason, over_copies
from .search.owners import Task
from .search.rounds import home_flops
from .search.search import Draft, Problem, fastest
from .search.slices import WORTH, check_split_over, slices_reason, with_cuts
from .search.state import able_owners
from .search.tensor_parallel import check_tensor_parallel, with_peers
from .terms.blocks import blocks_reason, in_blocks
from .terms.groups import assemblies
from .terms.layout import Geometries
from .terms.machine import Machine, machine_of
from .terms.pieces import Pieces
from .terms.types import Matrix, Parameter, Plan
from .terms.work import Work, WorkOf


def make_plan(
    parameters: Sequence[Parameter], work_of: WorkOf, options: MuonOptions, machine: Machine | None = None
) -> Plan:
    """The plan of one optimizer step. Deterministic: equal arguments give an equal plan on every rank.

    `machine` is what the ranks run on; by default GPUs, as the options say. Raises OptionError for an exchange that is
    no pattern, for owners that it has no use for, for matrices split over ranks where owners are single, for a way of
    tensor parallelism where there is none, and for buffers too small.
    """
    names = [name for name, pattern in PATTERNS.items() if not pattern.automatic]
    if options.exchange not in names:
        raise OptionError("exchange", f"= {options.exchange!r} is not one of {', '.join(names)}")
    if options.owners == "everyone" and PATTERNS[options.exchange].has_owners:
        raise OptionError("owners", "= 'everyone' needs every piece on every rank: set exchange = 'all_gather'")
    check_split_over(options)
    given, geometries = parameters, Geometries(parameters)
    check_tensor_parallel(options, geometries)
    if options.tensor_parallel == "blockwise":
        parameters = in_blocks(given, geometries)
        geometries = Geometries(parameters)
    matrices, works = _matrices(parameters, geometries, work_of)
    on = machine_of(options.machine) if machine is None else machine
    costs = Costs(Pieces(matrices, geometries, on.ranks_per_node), works, options.wire_bytes, on)
    # `auto` plays a step in which replicas share out the work and one in which they repeat it. Where none are, the two
    # are one problem.
    problems: list[Problem] = []
    for replicas in ("split", "redundant") if options.replicas == "auto" else (options.replicas,):
        problem = _divide(parameters, geometries, replace(options, replicas=replicas), costs)
        if not problems or (problem.home, problem.tasks) != (problems[0].home, problems[0].tasks):
            problems.append(problem)
    if options.tensor_parallel in ("distributed", "duplicated"):
        problems = [with_peers(problem, work_of) for problem in problems]
    cut = [found for problem in problems if (found := with_cuts(problem, work_of)) is not None]
    worth = WORTH if options.split_over == "auto" else 1.0
    draft, problem = _best_of([(problems, worth), (cut, 1.0), (over_copies(problems), worth / WORTH)])
    reasons = (
        draft.reason,
        copies_reason(draft),
        slices_reason(options, problem.costs.pieces.matrices),
        blocks_reason(options, given, parameters),
        _own_reason(parameters),
    )
    return Plan(
        parameters=problem.parameters,
        matrices=tuple(problem.costs.pieces.matrices),
        home=problem.home,
        buckets=draft.buckets,
        slots=draft.slots,
        wire_bytes=options.wire_bytes,
        works=tuple(problem.costs.works),
        reason="; ".join(filter(None, reasons)),
    )


def _own_reason(parameters: Sequence[Parameter]) -> str:
    """Which parameters ranks train each for itself although they look like copies; empty if there are none."""
    own = [parameter.fqn for parameter in parameters if parameter.own]
    if not own:
        return ""
    more = f" and {len(own) - 5} more" if len(own) > 5 else ""
    return f"{', '.join(own[:5])}{more}: plain tensors that differ between ranks; each rank orthogonalizes its own"


def _best_of(weighed: Sequence[tuple[Sequence[Problem], float]]) -> tuple[Draft, Problem]:
    """The draft with the least price times weight of those problems that have one, with its problem."""
    found, faults = list[tuple[float, Draft, Problem]](), list[OptionError]()
    for problems, weight in weighed:
        best = min(found, key=lambda one: one[0])[1] if found else None
        for problem in problems:
            try:
                # Slices change little of what a long search has found for whole matrices; another exchange does.
                sliced = any(matrix.slice is not None for matrix in problem.costs.pieces.matrices)
                draft = fastest(problem, best.near if best is not None and sliced else None)
                found.append((weight * draft.price, draft, problem))
            except OptionError as fault:
                faults.append(fault)
    if not found:
        raise faults[0]
    _, draft, problem = min(found, key=lambda one: one[0])
    return draft, problem


def _matrices(
    parameters: Sequence[Parameter], geometries: Geometries, work_of: WorkOf
) -> tuple[tuple[Matrix, ...], tuple[Work, ...]]:
    matrices = []
    works: dict[Work, int] = {}
    for number, parameter in enumerate(parameters):
        # Experts are alike: hundreds of matrices are asked for once.
        work_at: dict[tuple[int, int], tuple[int, int]] = {}
        for index in range(len(parameter.stack.matrices)):
            shape = geometries[number].shape(index)
            if shape not in work_at:
                work = work_of(number, *shape)
                work_at[shape] = work.flops, works.setdefault(work, len(works))
            matrices.append(Matrix(number, index, *shape, *work_at[shape]))
    return tuple(matrices), tuple(works)


def _divide(parameters: Sequence[Parameter], geometries: Geometries, options: MuonOptions, costs: Costs) -> Problem:
    """What is whole at home, and a task of each other matrix for each group that assembles it."""

    groups: dict[tuple[int, ...], int] = {}

    @cache
    def placed(geometry: int, split: bool) -> list[tuple[tuple[int, ...], list[int]]]:
        """For each matrix of a parameter its ranks at home, and the numbers of the groups that assemble it."""
        found = assemblies(geometries.shared[geometry], split)
        return [(one.home, [groups.setdefault(ranks, len(groups)) for ranks in one.groups]) for one in found]

    has_owners = PATTERNS[options.exchange].has_owners
    home: list[tuple[int, ...]] = []
    tasks: list[Task] = []
    for number, matrix in enumerate(costs.pieces.matrices):
        parameter = parameters[matrix.parameter]
        # Replicate promises that copies are equal. A plain tensor promises nothing of the other ranks' ones: where they
        # were not found equal, one rank's result would silently take the place of another's.
        split = has_owners and not parameter.own and options.replicas == "split"
        ranks, assembled_by = placed(geometries.index[matrix.parameter], split)[matrix.index]
        home.append(ranks)
        for group in assembled_by:
            tasks.append(Task(number, group, matrix.flops, matrix.numel * options.wire_bytes, parameter.layer))
    load = home_flops(home, costs.pieces.matrices)
    pattern = PATTERNS[options.exchange]
    able = _able(parameters, costs.pieces.matrices, tasks, tuple(groups))
    return Problem(tuple(parameters), options, pattern, costs, tuple(home), tuple(tasks), tuple(groups), load, able)


def _able(
    parameters: Sequence[Parameter],
    matrices: Sequence[Matrix],
    tasks: Sequence[Task],
    groups: Sequence[tuple[int, ...]],
) -> dict[int, tuple[int, ...]]:
    """The ranks that can own a matrix, where that depends on who keeps its momentum."""

    @cache
    def inside(ranks: tuple[int, ...], group: int) -> tuple[int, ...]:
        return tuple(sorted({*ranks} & {*groups[group]}))

    found = {}
    for task in tasks:
        matrix = matrices[task.matrix]
        if ranks := able_owners(parameters[matrix.parameter], matrix.index):
            found[task.matrix] = inside(ranks, task.group)
    return found
