"""From parameters to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..engine.layout.intervals import Geometries, Pieces
from ..engine.layout.types import Matrix, Plan
from ..engine.layout.work import (
    FLOAT32_COST,
    ROUNDING_BYTES,
    WIDE_BYTES,
    Elements,
    ElementTraffic,
    ElementwiseCost,
    Work,
    chunk_bytes,
)
from ..engine.planning import PlanRequest, has_replicas, matrices_of, separate_reasons, tasks_of
from ..engine.program.all_to_all import Pattern
from ..engine.program.patterns import PATTERNS
from ..options import MuonOptions, OptionError
from .machine import MachineRates
from .owners import eligible_owners, with_state_ranks
from .search import CandidatePlan, Problem, fastest_plan
from .walk import Costs

MUST_SAVE = 0.03
"""Share of the price that another pattern must save, so that small modelled gains do not decide."""
HOPS_FROM = 256
"""Ranks from which on two hops are tried: below, they save little in the model."""


def plan_by_search(request: PlanRequest, machine: MachineRates) -> Plan:
    """The fastest found plan on a machine. Equal arguments give equal plans on every rank.

    Raises OptionError for contradicting options, and for too small a `buffer_gib`.
    """
    options, passes = request.options, passes_of(request.elements, request.options)
    parameters = with_state_ranks(request.parameters, options, request.work_of, request.kept)
    geometries = Geometries(parameters)
    matrices, works = matrices_of(parameters, geometries, request.work_of)
    # On a CPU, batches stay in the caches.
    works = _with_full_batches(matrices, works, passes) if machine.host else works
    costs = Costs(Pieces(matrices, geometries, machine.ranks_per_node), works, machine, passes)
    given = tasks_of(parameters, geometries, matrices, works, options)
    eligible = eligible_owners(parameters, matrices, given)
    problem, best = _fastest(Problem(options, PATTERNS[options.exchange], costs, given, eligible))
    notes = *_pattern_reasons(problem), *separate_reasons(parameters)
    if options.state == "owner" and not any(parameter.state_ranks for parameter in parameters):
        notes += ("state = 'owner' has no effect: no matrix has replicas that could do without momentum",)
    return Plan(
        parameters=tuple(parameters),
        matrices=matrices,
        local=given.local,
        buckets=best.buckets,
        buffer_sets=best.buffer_sets,
        works=works,
        reason="; ".join(filter(None, (best.reason, *notes))),
        passes=passes,
        ranks_per_node=machine.ranks_per_node if any(PATTERNS[b.exchange].knows_nodes for b in best.buckets) else 0,
    )


def _fallbacks(problem: Problem, pattern: Pattern) -> Counter[str]:
    """The matrices that go by all_to_all instead of the pattern, by cause; no cause: those by the pattern."""
    pieces, causes = problem.costs.pieces, Counter[str]()
    kinds = Counter((pieces.kinds[task.matrix], task.group) for task in problem.given.tasks)
    for (kind, group), count in kinds.items():
        causes[pattern.fallback(kind, problem.given.groups[group], pieces)] += count
    return causes


def _pattern_reasons(problem: Problem) -> Iterator[str]:
    name, price = problem.pattern.name, f"at least {MUST_SAVE:.0%} less price (step time and memory) than"
    if name == "hierarchical":
        yield (
            "owners return results to their own replica, and replicas all-gather the results (hierarchical): "
            f"{price} with returns to all replicas"
        )
    fallbacks = _fallbacks(problem, problem.pattern)
    if name == "two_hops" and fallbacks[""]:
        saved = f": {price} straight to the owner" if problem.options.exchange == "all_to_all" else ""
        yield (
            "pieces go over the network to the owner's node by the links of all its ranks, then inside the node "
            f"(two_hops){saved}"
        )
    yield from (f"{n:,} matrices by all_to_all instead of {name}: {cause}" for cause, n in fallbacks.items() if cause)


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
    patterns, given, pieces, two_hops = [problem.pattern], problem.given, problem.costs.pieces, PATTERNS["two_hops"]
    if problem.pattern is PATTERNS["all_to_all"]:
        if has_replicas(given.tasks, given.groups, pieces):
            patterns.append(PATTERNS["hierarchical"])
        if len(pieces.ranks()) >= HOPS_FROM and _fallbacks(problem, two_hops)[""]:
            patterns.append(two_hops)
    found, faults = list[tuple[float, Problem, CandidatePlan]](), list[OptionError]()
    for pattern in patterns:
        variant = replace(problem, pattern=pattern)
        try:
            best = fastest_plan(variant)
        except OptionError as fault:
            faults.append(fault)
        else:
            must_save = 0.0 if pattern is problem.pattern else MUST_SAVE
            found.append((best.price / (1 - must_save), variant, best))
    if not found:
        raise faults[0]
    _, problem, best = min(found, key=lambda priced: priced[0])
    return problem, best


def passes_of(elements: Elements, options: MuonOptions) -> ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Gradients have the dtypes of the weights."""
    state_bytes, on_cpu = 2 if options.state_dtype == "bfloat16" else 4, elements.device == "cpu"
    traffics, advance, apply, drawn = list[ElementTraffic](), list[int](), list[int](), False
    if not elements.kinds:
        return FLOAT32_COST
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
        traffic=max(traffics, key=lambda moved: (moved.advance + moved.apply, moved)),
    )


def traffic(
    element: int, state: int, wire: int, *, stochastic: bool, cautious: bool, fused: bool = False, device: str = "cuda"
) -> ElementTraffic:
    """Traffic for elements of weights, momentum and buffers with these sizes in bytes.

    Counts the operators of `engine/step/muon.py` and `features/rounding.py`, without caches;
    tests/unit/step/test_memory.py compares. `stochastic`: rounding of bfloat16 weights. `cautious`: weight decay.
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
