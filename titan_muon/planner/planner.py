"""From parameters to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..engine.layout.intervals import Geometries, Pieces
from ..engine.layout.types import Bucket, Matrix, Parameter, Plan
from ..engine.layout.work import (
    FLOAT32_COST,
    ROUNDING_BYTES,
    WIDE_BYTES,
    Elements,
    ElementTraffic,
    ElementwiseCost,
    Work,
    WorkOf,
    chunk_bytes,
)
from ..engine.planning import PlanRequest, has_replicas, matrices_of, separate_reasons
from ..engine.program.patterns import PATTERNS
from ..options import MuonOptions, OptionError
from .machine import MachineRates, machine_of
from .owners import Problem, make_problem, with_state_ranks
from .search import CandidatePlan, fastest_plan
from .walk import Costs

MUST_SAVE = 0.03
"""Share of the price that another pattern must save, so that small modelled gains do not decide."""
HOPS_FROM = 256
"""Ranks from which on two hops are tried: below, they save little in the model."""


@dataclass(frozen=True)
class Search:
    """A planner: the fastest found plan on a machine."""

    machine: MachineRates

    def __call__(self, request: PlanRequest) -> Plan:
        options, work_of = request.options, request.work_of
        parameters = with_state_ranks(request.parameters, options, work_of, request.kept)
        return make_plan(parameters, work_of, options, self.machine, passes_of(request.elements, options))


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
    matrices, works = matrices_of(parameters, geometries, work_of)
    rates = machine_of(options.machine) if machine is None else machine
    # On a CPU, batches stay in the caches.
    works = _with_full_batches(matrices, works, passes) if rates.host else works
    costs = Costs(Pieces(matrices, geometries, rates.ranks_per_node), works, rates, passes)
    problem, best = _fastest(make_problem(parameters, geometries, options, costs))
    buckets, fallbacks = _by_their_way(best.buckets, problem)
    knows_nodes = any(PATTERNS[bucket.exchange].knows_nodes for bucket in buckets)
    reasons = (
        best.reason,
        _hierarchical_reason(problem),
        *_hops_reasons(problem, fallbacks, found=knows_nodes),
        *separate_reasons(parameters),
        _state_reason(options, parameters),
    )
    return Plan(
        parameters=problem.parameters,
        matrices=tuple(problem.costs.pieces.matrices),
        local=problem.local,
        buckets=buckets,
        buffer_sets=best.buffer_sets,
        works=tuple(problem.costs.works),
        reason="; ".join(filter(None, reasons)),
        passes=passes,
        ranks_per_node=rates.ranks_per_node if knows_nodes else 0,
    )


def _by_their_way(buckets: Sequence[Bucket], problem: Problem) -> tuple[tuple[Bucket, ...], Counter[str]]:
    """The buckets by the pattern that they take, and the matrices that fall back to all_to_all, by cause."""
    pieces, named, fallbacks = problem.costs.pieces, list[Bucket](), Counter[str]()
    for bucket in buckets:
        kinds = {pieces.kinds[matrix] for matrix in bucket.matrices}
        if cause := problem.pattern.fallback(kinds, bucket.group, pieces):
            fallbacks[cause] += len(bucket.matrices)
        named.append(replace(bucket, exchange="all_to_all") if cause else bucket)
    return tuple(named), fallbacks


def _hops_reasons(problem: Problem, fallbacks: Mapping[str, int], *, found: bool) -> Iterator[str]:
    if found:
        price = f": at least {MUST_SAVE:.0%} less price (step time and memory) than straight to the owner"
        yield (
            "pieces go over the network to the owner's node by the links of all its ranks, then inside the node "
            f"(two_hops){price if problem.options.exchange == 'all_to_all' else ''}"
        )
    for cause, count in fallbacks.items():
        yield f"{count:,} matrices by all_to_all instead of two_hops: {cause}"


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
            best = fastest_plan(variant)
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
    if problem.pattern is PATTERNS["all_to_all"] and has_replicas(problem.tasks, problem.groups, pieces):
        yield replace(problem, pattern=PATTERNS["hierarchical"]), MUST_SAVE
    if problem.pattern is PATTERNS["all_to_all"] and len(pieces.ranks()) >= HOPS_FROM:
        kinds: dict[int, set[int]] = {}
        for task in problem.tasks:
            kinds.setdefault(task.group, set()).add(pieces.kinds[task.matrix])
        two_hops, groups = PATTERNS["two_hops"], problem.groups
        if not all(two_hops.fallback(of_group, groups[group], pieces) for group, of_group in kinds.items()):
            yield replace(problem, pattern=two_hops), MUST_SAVE


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


def passes_of(elements: Elements, options: MuonOptions) -> ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Gradients have the dtypes of the weights."""
    state_bytes, traffics, on_cpu = (
        2 if options.state_dtype == "bfloat16" else 4,
        list[ElementTraffic](),
        elements.device == "cpu",
    )
    advance, apply, drawn = [0], [0], False
    for kind in elements.kinds:
        size, wide = kind.weight_bytes, max(state_bytes, kind.weight_bytes)
        stochastic = options.rounding == "stochastic" and kind.is_bfloat16
        drawn = drawn or stochastic
        kept, temporary = 0, 0
        if options.fused is not True:
            # The nesterov blend (or the wide gradient that becomes the blend), and the wide momentum. A GradScaler, as
            # accelerators may have, takes a scaled copy of the gradients.
            kept += wide * (1 + (state_bytes < wide)) + size * (not on_cpu)
            temporary = ROUNDING_BYTES if stochastic else size if size > kind.wire_bytes else 0
            if on_cpu and size == kind.wire_bytes == 2 and not stochastic:
                # `add_scaled` converts updates of 16 bits.
                temporary += WIDE_BYTES
            temporary += max(WIDE_BYTES, size) if options.cautious else 0
        advance.append(kept)
        apply.append(temporary)
        flags = {"stochastic": stochastic, "cautious": options.cautious, "fused": options.fused is True}
        traffics.append(traffic(size, state_bytes, kind.wire_bytes, device=elements.device, **flags))
    limit = chunk_bytes(elements.device)
    return ElementwiseCost(
        advance_elements=limit // WIDE_BYTES,
        advance_bytes=max(advance),
        apply_elements=limit // (ROUNDING_BYTES if drawn else WIDE_BYTES),
        apply_bytes=max(apply),
        finish_bytes=elements.rescale_bytes,
        # With the fields as a second key, because two kinds of parameters may have equal sums.
        traffic=max(traffics, key=lambda moved: (moved.advance + moved.apply, moved), default=FLOAT32_COST.traffic),
    )


def traffic(
    element: int,
    state: int,
    wire: int,
    *,
    stochastic: bool,
    cautious: bool,
    fused: bool = False,
    device: str = "cuda",
) -> ElementTraffic:
    """Traffic for elements of weights, momentum and buffers with these sizes in bytes.

    Counts the operators of `engine/step/muon.py` and `engine/step/rounding.py`, without caches;
    tests/unit/plan/test_passes.py compares. `stochastic`: rounding of bfloat16 weights. `cautious`: weight decay.
    `fused`: kernels of `kernels/passes.py`.
    """
    if fused:
        # Each tensor once. Of lists of tensors the check, the addresses and the flags are left.
        return ElementTraffic(2 * state + element + wire, 1, 2 * element + wire, 1, lists=3, fused=True)
    # lerp in the wider dtype, another for Nesterov, and packing.
    wide = max(element, state)
    advance, launches = 7 * wide + wire, 3
    if element < wide:
        advance, launches = advance + element + wide, launches + 1
    if state < wide:
        advance, launches = advance + 2 * (state + wide), launches + 2
    if stochastic:
        # Weights and updates in float32, a hash of each element, and the way back.
        return ElementTraffic(advance, launches, 120 + wire + 60 * cautious, 16 + 6 * cautious)
    # Decay, updates in the dtype of wider weights, and the sum.
    apply, apply_launches = (6 * element + wire, 3) if wire < element else (4 * element + wire, 2)
    if cautious:
        apply, apply_launches = apply + 4 * element + wire + 10 * max(element, wire), apply_launches + 6
    if device == "cpu" and element == wire == 2:
        # `add_scaled` converts what it adds to float32.
        apply, apply_launches = apply + 8 * (1 + cautious), apply_launches + 1 + cautious
    return ElementTraffic(advance, launches, apply, apply_launches)
