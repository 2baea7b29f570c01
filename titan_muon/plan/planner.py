"""From parameters to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..options import MuonOptions, OptionError
from .cost.walk import Costs
from .exchange.patterns import PATTERNS
from .search.owners import Problem, make_problem
from .search.search import CandidatePlan, fastest
from .terms.layout import Geometries
from .terms.machine import FLOAT32_COST, ElementwiseCost, MachineRates, Work, WorkOf, machine_of
from .terms.pieces import Pieces
from .terms.types import Matrix, Parameter, Plan

MUST_SAVE = 0.03
"""Share of the price that hierarchical returns must save, so that small modelled gains do not decide."""


def make_plan(
    parameters: Sequence[Parameter],
    work_of: WorkOf,
    options: MuonOptions,
    machine: MachineRates | None = None,
    passes: ElementwiseCost = FLOAT32_COST,
) -> Plan:
    """The plan of a step. Equal arguments give equal plans on every rank.

    `machine`: by default a GPU machine by `options.machine`. Raises OptionError for contradicting options, and for too
    small a `buffer_gib`.
    """
    geometries = Geometries(parameters)
    matrices, works = _matrices(parameters, geometries, work_of)
    rates = machine_of(options.machine) if machine is None else machine
    # On a CPU, batches stay in the caches.
    works = _with_full_batches(matrices, works, passes) if rates.host else works
    costs = Costs(Pieces(matrices, geometries, rates.ranks_per_node), works, rates, passes)
    problem, best = _fastest(make_problem(parameters, geometries, options, costs))
    reasons = (
        best.reason,
        _hierarchical_reason(problem),
        *_separate_reasons(parameters),
        _state_reason(options, parameters),
    )
    return Plan(
        parameters=problem.parameters,
        matrices=tuple(problem.costs.pieces.matrices),
        local=problem.local,
        buckets=best.buckets,
        buffer_sets=best.buffer_sets,
        works=tuple(problem.costs.works),
        reason="; ".join(filter(None, reasons)),
        passes=passes,
    )


def _with_full_batches(matrices: Sequence[Matrix], works: Sequence[Work], passes: ElementwiseCost) -> tuple[Work, ...]:
    """The works with batches as large as the largest matrix, whose memory a step takes anyway: fewer launches."""
    numels = {matrix.work: matrix.numel for matrix in matrices}
    assembled = {place: works[place].wire_bytes * numel for place, numel in numels.items()}
    iteration = {place: max(works[place].bytes, passes.finish_bytes * numel) for place, numel in numels.items()}
    most, most_iteration = max(assembled.values(), default=0), max(iteration.values(), default=0)
    return tuple(
        replace(work, batch=max(work.batch, min(most // assembled[place], most_iteration // iteration[place])))
        for place, work in enumerate(works)
    )


def _fastest(problem: Problem) -> tuple[Problem, CandidatePlan]:
    """The problem whose best plan has the least price / (1 - share to save), and the plan. The first wins."""
    found, faults = list[tuple[float, Problem, CandidatePlan]](), list[OptionError]()
    for variant, must_save in _variants(problem):
        try:
            best = fastest(variant)
        except OptionError as fault:
            faults.append(fault)
        else:
            found.append((best.price / (1 - must_save), variant, best))
    if not found:
        raise faults[0]
    _, problem, best = min(found, key=lambda priced: priced[0])
    return problem, best


def _variants(problem: Problem) -> Iterator[tuple[Problem, float]]:
    """Problems to search, and the share of the price that each must save."""
    pieces = problem.costs.pieces
    yield problem, 0.0
    kinds = {(pieces.kinds[task.matrix], task.group) for task in problem.tasks}
    has_replicas = any(len(pieces.replicas(kind, problem.groups[group])) > 1 for kind, group in kinds)
    if has_replicas and problem.pattern is PATTERNS["all_to_all"]:
        yield replace(problem, pattern=PATTERNS["hierarchical"]), MUST_SAVE


def _hierarchical_reason(problem: Problem) -> str:
    if problem.pattern is not PATTERNS["hierarchical"]:
        return ""
    return (
        "owners return results to their own replica, and replicas all-gather the results (hierarchical): at least "
        f"{MUST_SAVE:.0%} less price (step time and memory) than with returns to all replicas"
    )


def _state_reason(options: MuonOptions, parameters: Sequence[Parameter]) -> str:
    if options.state != "owner" or any(parameter.state_ranks for parameter in parameters):
        return ""
    return "state = 'owner' has no effect: no matrix has replicas that could do without momentum"


def _separate_reasons(parameters: Sequence[Parameter]) -> Iterator[str]:
    texts = {
        True: "plain tensors that differ between ranks; each rank orthogonalizes its own",
        False: "separate tensors on separate meshes; each mesh orthogonalizes its own, with momentum on all its ranks",
    }
    for plain, text in texts.items():
        if names := [p.fqn for p in parameters if p.separate and p.plain == plain]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{', '.join(names[:5])}{more}: {text}"


def _matrices(
    parameters: Sequence[Parameter], geometries: Geometries, work_of: WorkOf
) -> tuple[tuple[Matrix, ...], tuple[Work, ...]]:
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
