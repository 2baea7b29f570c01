"""Report on a run's optimizers: parameters and reasons, cost of Muon's plan, loads of the owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod

from torch import Tensor

from ..assignment.rules import Assignment, splits_with
from ..assignment.table import doubts, split_lines
from ..engine.layout.intervals import Geometries
from ..engine.layout.types import Plan
from ..engine.planning import Assembly, assemblies
from ..engine.tensors.names import family
from ..matrices.stacks import stack_of
from ..options import Split, plural
from ..owned import is_owned
from ..planner.ownership import OwnedTotals, load_lines
from ..planner.summary import Summary
from ..planner.timeline import Timeline
from .model import Estimate, PlannedModel

LONG_TAIL = 0.1
"""Report the exposed return above this share of the step."""
OWNERS_SHOWN = 16


def optimizer_lines(assigned: Sequence[Assignment], splits: Sequence[Split], world_size: int) -> Iterable[str]:
    """Each optimizer's share of the whole model, default splits, and warnings."""
    total = sum(prod(a.shape) for a in assigned)
    yield f"{total:,} parameters on {plural(world_size, 'rank')}"
    for optimizer in sorted({a.optimizer for a in assigned}):
        tensors = [a for a in assigned if a.optimizer == optimizer]
        share = 100 * sum(prod(a.shape) for a in tensors) / total
        count = plural(len(tensors), "tensor")
        if optimizer == "muon":
            every = splits_with(splits, assigned)
            count = f"{sum(len(stack_of(a.fqn, a.shape, every).matrices) for a in tensors):,} matrices"
        yield f"{optimizer}: {count}, {share:.1f} % of parameters"
    yield from split_lines(assigned, splits)
    yield from doubts(assigned, splits)


MOST_REPEATS = 1.5
"""Orthogonalizations per matrix above which a plan explains itself."""


def plan_lines(plan: Plan | None, summary: Summary | None, timeline: Timeline | None = None) -> Iterable[str]:
    """Cost of a Muon step, and with a timeline modelled times and reasons of automatic choices."""
    if plan is None or summary is None:
        return
    exchanges = sorted({bucket.exchange for bucket in plan.buckets})
    local = sum(1 for ranks in plan.local if ranks)
    by = f" by {', '.join(exchanges)}" if exchanges else ""
    yield f"Muon step: {local:,} matrices local, {len(plan.matrices) - local:,} exchanged{by}"
    mean = sum(cost.ns_flops for cost in summary.ranks) / len(summary.ranks)
    ratio = summary.ns_flops_max / mean
    yield f"  Newton-Schulz   {summary.ns_flops_max / 1e9:,.1f} GFLOP on the busiest rank, {ratio:.3f} x the mean"
    if idle := sum(1 for cost in summary.ranks if cost.matrices == 0):
        yield f"  idle ranks      {idle} of {len(summary.ranks)} orthogonalize nothing: fewer matrices than ranks"
    if summary.orthogonalizations > MOST_REPEATS * summary.muon_matrices:
        replicas = [len(ranks) for ranks in plan.local if len(ranks) > 1]
        reason = (
            f"{len(replicas):,} matrices are whole on up to {max(replicas)} replicas, and each replica orthogonalizes "
            'them (muon.expert.replicas = "redundant"). To orthogonalize each matrix once, set '
            'parallelism.data_parallel_replicate_degree = 1, or "split", which sends results to the other replicas'
            if replicas
            else 'every rank of a bucket orthogonalizes its matrices; muon.expert.exchange = "all_to_all" does not'
        )
        yield f"  repeated        {summary.orthogonalizations / summary.muon_matrices:.1f} x the least work: {reason}"
    yield from _method_lines(plan, reasons=timeline is not None)
    if exchanges:
        in_flight = f"{plural(plan.buffer_sets, 'bucket')} in flight"
        yield f"  collectives     {summary.collectives_per_step} per step and rank, {in_flight}"
        yield f"  sent            {summary.bytes_sent_max / 2**20:,.1f} MiB by the busiest rank"
        yield f"  buffers         {summary.buffer_bytes_max / 2**20:,.1f} MiB on the fullest rank"
    if kept := sum(bool(parameter.state_ranks) for parameter in plan.parameters):
        most = max(cost.state_elements for cost in summary.ranks)
        yield f"  momentum        of {kept:,} parameters on their owners alone, {most:,} elements on the fullest rank"
    if timeline is not None:
        yield from _time_lines(timeline)
    if plan.reason:
        yield f"  planned         {plan.reason}"


def step_lines(model: PlannedModel, estimate: Estimate) -> Iterable[str]:
    """Cost and modelled time of a Muon step, and why owned parameters communicate."""
    muon = model.optimizers.muon
    yield from plan_lines(model.plan, estimate.summary, estimate.timeline)
    yield from owned_step_lines(model.plan, model.parameters, skips=muon is not None and muon.options.skips_missing)


def adamw_lines(estimate: Estimate) -> Iterable[str]:
    """Modelled time of AdamW beside Muon, and instead of Muon."""
    yield (f"AdamW: {_ms(estimate.others)} of a step beside Muon; AdamW for all parameters takes {_ms(estimate.adamw)}")


def memory_lines(estimate: Estimate, *, full: bool) -> Iterable[str]:
    """Memory of a rank by purpose, and the table of owners."""
    memory = estimate.memory
    yield "\nmemory per rank, without activations"
    host = {name: size for name, size in memory.host_sizes.items() if size > 0}
    for name, size in (memory.sizes | host).items():
        yield f"  {name.replace('_', ' '):<18}{size / 2**20:>12,.1f} MiB"
    if memory.keeps_buffers:
        yield f"  of these, {memory.kept / 2**20:,.1f} MiB of buffers and matrices stay between steps"
    for name in memory.uncounted:
        yield f"  the states of {name} are not counted: only the package that registered it knows their size"
    if estimate.loads:
        yield ""
        yield from owner_lines(estimate.loads, full=full)


def owned_step_lines(plan: Plan | None, parameters: Mapping[str, Tensor], *, skips: bool) -> Iterable[str]:
    """Reasons and remedies if the step communicates despite owned parameters.

    `skips`: whether Muon skips missing gradients.
    """
    if plan is None or not any(map(is_owned, parameters.values())):
        return
    causes: dict[str, Counter[str]] = {}
    for reason, name in _causes(plan, parameters):
        causes.setdefault(reason, Counter())[name] += 1
    lines = []
    for reason, families in causes.items():
        names = ", ".join(filter(None, families))
        lines.append(f"  {families.total():,} matrices{f' ({names})' if names else ''}: {reason}")
    if skips and any(len(ranks) > 1 for ranks in plan.local):
        lines.append(
            '  muon.expert.on_bad_gradient skips missing gradients: replicas compare theirs; "error" would not'
        )
    if lines:
        yield "owned, and yet the step communicates:"
        yield from lines


def _causes(plan: Plan, parameters: Mapping[str, Tensor]) -> Iterable[tuple[str, str]]:
    """Reason, remedy and, if named there, parameter family of each exchanged matrix."""
    geometries = Geometries(plan.parameters)

    @cache
    def repeated(geometry: int) -> tuple[Assembly, ...]:
        return assemblies(geometries.shared[geometry], split=False)

    for index, matrix in enumerate(plan.matrices):
        if plan.local[index]:
            continue
        fqn = plan.parameters[matrix.parameter].fqn
        if repeated(geometries.index[matrix.parameter])[matrix.index].local:
            yield 'muon.expert.replicas = "split" shares out replicas; "redundant" would not', ""
        elif is_owned(parameters[fqn]):
            yield 'tensor parallelism cuts owned matrices; placement.muon = "owned" without TP would not', ""
        else:
            yield 'sharded; a placement.rule with "owned" or an optimizer.rule with "adamw" would not', family(fqn)


def _time_lines(timeline: Timeline) -> Iterable[str]:
    last = timeline.last
    parts = f"Newton-Schulz {_ms(last.orthogonalize)}, momentum and apply {_ms(last.passes)}, waits {_ms(last.waits)}"
    yield f"  modelled time   {_ms(last.seconds)} on {timeline.machine}, rank {last.rank}: {parts}"
    yield f"  limit           Newton-Schulz {_ms(timeline.least)}, busiest link {_ms(timeline.link)}"
    if timeline.hidden is not None:
        yield (
            f"  in forward      {_ms(timeline.hidden)} of results and updates are hidden behind the step if forward is "
            f"as long; in the step {_ms(timeline.exposed)} of the exchange stay exposed"
        )
    elif timeline.tail > LONG_TAIL * last.seconds:
        yield f"  way back        {_ms(timeline.tail)} of results and updates behind all Newton-Schulz (muon.overlap)"


def _ms(seconds: float) -> str:
    # A difference of equal times leaves rounding.
    return f"{1e3 * seconds:,.3g} ms" if seconds > 1e-9 else "0 ms"


def _method_lines(plan: Plan, *, reasons: bool) -> Iterable[str]:
    for index, work in enumerate(plan.works):
        counts = Counter(f"{matrix.rows}x{matrix.cols}" for matrix in plan.matrices if matrix.work == index)
        shapes = ", ".join(f"{count:,} of {shape}" for shape, count in counts.items())
        yield f"  orthogonalized  {shapes} by {work.method}{f': {work.reason}' if work.reason and reasons else ''}"


def owner_summary(loads: Mapping[int, OwnedTotals]) -> Iterable[str]:
    """Balance of the owners, and the number of idle ranks."""
    if not loads:
        return
    sizes = [load.bytes for load in loads.values()]
    most, mean = max(sizes), sum(sizes) / len(sizes)
    yield f"owned: {most / 2**20:,.1f} MiB at rest on the fullest of {len(sizes):,} ranks, {most / mean:.3f} x the mean"
    if idle := sum(1 for load in loads.values() if load.matrices == 0):
        total = sum(load.matrices for load in loads.values())
        yield f"  {idle:,} ranks own nothing: there are {total:,} matrices for {len(sizes):,} ranks"


def owner_lines(loads: Mapping[int, OwnedTotals], *, full: bool) -> Iterable[str]:
    """`owner_summary` and the table of owners: matrices, bytes, FLOPs per step."""
    yield from owner_summary(loads)
    table = list(load_lines(loads)) if loads else []
    shown = len(table) if full else OWNERS_SHOWN + 1
    yield from (f"  {line}" for line in table[:shown])
    if len(table) > shown:
        yield f"  ... {len(table) - shown:,} lines more with --full"
