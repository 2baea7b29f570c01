"""From parameters to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..options import MuonOptions, OptionError
from .cost.costs import Costs
from .exchange.all_gather import PATTERNS
from .search.candidates import CANDIDATES, Candidate
from .search.problem import Problem, make_problem
from .search.search import CandidatePlan, fastest
from .search.slices import check_split_over
from .search.tensor_parallel import read_in_mode
from .terms.blocks import blocks_reason
from .terms.layout import Geometries
from .terms.machine import MachineRates, machine_of
from .terms.pieces import Pieces
from .terms.types import Matrix, Parameter, Plan
from .terms.work import FLOAT32_COST, ElementwiseCost, Work, WorkOf


def make_plan(
    parameters: Sequence[Parameter],
    work_of: WorkOf,
    options: MuonOptions,
    machine: MachineRates | None = None,
    passes: ElementwiseCost = FLOAT32_COST,
) -> Plan:
    """The plan of a step. Equal arguments give equal plans on every rank.

    `machine`: by default a GPU machine by `options.machine`. Raises OptionError for contradicting options, and for too
    small a `buffer_bytes`.
    """
    if options.owners == "everyone" and PATTERNS[options.exchange].has_owners:
        raise OptionError("owners", "= 'everyone' needs every piece on every rank: set exchange = 'all_gather'")
    check_split_over(options)
    whole_parameters, (parameters, geometries) = parameters, read_in_mode(parameters, options)
    matrices, works = _matrices(parameters, geometries, work_of)
    rates = machine_of(options.machine) if machine is None else machine
    costs = Costs(Pieces(matrices, geometries, rates.ranks_per_node), works, options.wire_bytes, rates, passes)
    problem = make_problem(parameters, geometries, options, costs)
    candidate, best = _best(problem, work_of)
    problem = candidate.problem
    blocks = blocks_reason(options, whole_parameters, parameters)
    no_state = options.state == "owner" and not any(parameter.state_ranks for parameter in parameters)
    momentum = (
        "state = 'owner' has no effect: no matrix has replicas that could do without momentum" if no_state else ""
    )
    reasons = (best.reason, candidate.reason, blocks, *_separate_reasons(parameters), momentum)
    return Plan(
        parameters=problem.parameters,
        matrices=tuple(problem.costs.pieces.matrices),
        local=problem.local,
        buckets=best.buckets,
        buffer_sets=best.buffer_sets,
        wire_bytes=options.wire_bytes,
        works=tuple(problem.costs.works),
        reason="; ".join(filter(None, reasons)),
        passes=passes,
    )


def _separate_reasons(parameters: Sequence[Parameter]) -> Iterator[str]:
    texts = {
        True: "plain tensors that differ between ranks; each rank orthogonalizes its own",
        False: "separate tensors on separate meshes; each mesh orthogonalizes its own, with momentum on all its ranks",
    }
    for plain, text in texts.items():
        if names := [p.fqn for p in parameters if p.separate and p.plain == plain]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{', '.join(names[:5])}{more}: {text}"


def _best(problem: Problem, work_of: WorkOf) -> tuple[Candidate, CandidatePlan]:
    """The candidate with the least price / (1 - must_save), and its best plan."""
    found, faults = list[tuple[float, Candidate, CandidatePlan]](), list[OptionError]()
    for candidate in (candidate for make in CANDIDATES for candidate in make(problem, work_of)):
        try:
            best = fastest(candidate.problem)
        except OptionError as fault:
            faults.append(fault)
        else:
            found.append((best.price / (1 - candidate.must_save), candidate, best))
    if not found:
        raise faults[0]
    _, candidate, best = min(found, key=lambda priced: priced[0])
    return candidate, best


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
