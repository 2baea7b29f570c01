"""A run's optimizers in words: which takes which parameter and why, and what Muon's plan costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_muon.owned import is_owned
from titan_muon.owned.param import holders
from titan_muon.plan import Plan, Summary
from titan_muon.titan.rules import Assignment


@dataclass(frozen=True)
class Row:
    """A line of the parameter table."""

    name: str
    shape: str
    optimizer: str
    matrices: str
    placement: str
    reason: str


HEADER = Row("parameter", "shape", "optimizer", "matrices", "placement", "why")


def parameter_table(
    assigned: Sequence[Assignment], parameters: Mapping[str, Tensor], plan: Plan | None, *, full: bool
) -> str:
    """Parameter -> optimizer -> matrices -> placement; without `full`, one line for what all layers have alike."""
    blocks = {} if plan is None else {p.fqn: len(p.stack.matrices) for p in plan.parameters}
    counts: dict[Row, int] = {}
    for a in assigned:
        name = a.fqn if full else re.sub(r"\.\d+(?=\.|$)", ".*", a.fqn)
        shape, placement = "x".join(map(str, a.shape)), _placement(parameters[a.fqn], full)
        row = Row(name, shape, a.optimizer, _matrices(a, blocks.get(a.fqn)), placement, a.reason)
        counts[row] = counts.get(row, 0) + 1
    rows = [replace(row, name=f"{row.name}  ({n})" if n > 1 else row.name) for row, n in counts.items()]
    lines = [astuple(row) for row in (HEADER, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _matrices(assignment: Assignment, blocks: int | None) -> str:
    if blocks is None:
        return "-"
    rows, rest = divmod(prod(assignment.shape[:-1]), blocks)
    return f"{blocks} of {rows}x{assignment.shape[-1]}" if rest == 0 else f"{blocks}"


def _placement(parameter: Tensor, full: bool) -> str:
    if not isinstance(parameter, DTensor):
        return "whole on each rank"
    names: Sequence[str] | None = parameter.device_mesh.mesh_dim_names
    if names is None:
        names = [str(axis) for axis in range(parameter.device_mesh.ndim)]
    axes = zip(parameter.placements, names, parameter.device_mesh.shape, strict=True)
    parts = [f"{placement} {name} {size}" for placement, name, size in axes if size > 1]
    if is_owned(parameter):
        ranks = ", ".join(map(str, holders(parameter)))
        parts.insert(0, f"owned by rank {ranks}" if full else "owned")
    return ", ".join(parts) if parts else "whole"


def optimizer_lines(assigned: Sequence[Assignment], plan: Plan | None, world_size: int) -> Iterable[str]:
    """How much each optimizer takes."""
    total = sum(prod(a.shape) for a in assigned)
    yield f"{total:,} parameters on {world_size} ranks"
    for optimizer in sorted({a.optimizer for a in assigned}):
        taken = [a for a in assigned if a.optimizer == optimizer]
        share = 100 * sum(prod(a.shape) for a in taken) / total
        what = f"{len(plan.matrices):,} matrices" if optimizer == "muon" and plan else f"{len(taken):,} tensors"
        yield f"{optimizer}: {what}, {share:.1f} % of parameters"


def _method_lines(plan: Plan) -> Iterable[str]:
    """Which algorithm orthogonalizes which shapes, and why."""
    shapes: dict[int, dict[str, int]] = {}
    for matrix in plan.matrices:
        counts, shape = shapes.setdefault(matrix.work, {}), f"{matrix.rows}x{matrix.cols}"
        counts[shape] = counts.get(shape, 0) + 1
    for index, counts in shapes.items():
        work = plan.works[index]
        which = ", ".join(f"{count:,} of {shape}" for shape, count in counts.items())
        yield f"  orthogonalized  {which} by {work.method}{f': {work.reason}' if work.reason else ''}"


def plan_lines(plan: Plan | None, summary: Summary | None) -> Iterable[str]:
    """What a Muon step costs, and why an automatic choice fell as it did."""
    if plan is None or summary is None:
        return
    exchanges = sorted({bucket.exchange for bucket in plan.buckets})
    home = sum(1 for ranks in plan.home if ranks)
    by = f" by {', '.join(exchanges)}" if exchanges else ""
    yield f"Muon step: {home:,} matrices whole at home, {len(plan.matrices) - home:,} exchanged{by}"
    ratio = summary.ns_flops_max / summary.ns_flops_lower_bound
    path = f"{summary.ns_flops_max / 1e9:,.1f} GFLOP"
    yield f"  Newton-Schulz   {path} on the longest path, {ratio:.3f} x the least possible"
    if idle := sum(1 for cost in summary.ranks if cost.matrices == 0):
        yield f"  idle ranks      {idle} of {len(summary.ranks)} orthogonalize nothing: fewer matrices than ranks"
    yield from _method_lines(plan)
    if exchanges:
        yield f"  collectives     {summary.collectives_per_step} per step and rank, {plan.slots} buckets in flight"
        yield f"  sent            {summary.bytes_sent_max / 2**20:,.1f} MiB by the busiest rank"
        yield f"  buffers         {summary.buffer_bytes_max / 2**20:,.1f} MiB on the fullest rank"
    for reason in dict.fromkeys(bucket.reason for bucket in plan.buckets if bucket.reason):
        yield f"  exchange        {reason}"
