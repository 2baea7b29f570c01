"""`--dry-run`: what training a recipe would do, printed: the recipe, who takes which parameter, the plan, memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_muon.layouts import local
from titan_muon.matrices import Assignment
from titan_muon.plan import Plan, Summary, summarize
from titan_muon.titan.blueprint import Blueprint, draw, smallest_world
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml

STATES = {"muon": 1, "adamw": 2, "adam": 2}
"""Tensors of the parameter's size that an optimizer keeps."""


def report(recipe: Recipe, world_size: int | None, *, full: bool, json: str | None) -> None:
    """Print what training would do on `world_size` ranks, by default the fewest that the degrees fit on.

    `full` lists every parameter instead of one line for all layers; `json` is a file for the numbers. Raises
    RecipeError as training would.
    """
    blueprint = draw(recipe, smallest_world(recipe) if world_size is None else world_size)
    summary = None if blueprint.plan is None else summarize(blueprint.plan)
    memory = memory_per_rank(blueprint, summary)
    print(to_toml(recipe))
    print(_table(_rows(blueprint, full)))
    print("\n".join(["", *_counts(blueprint), *_plan_lines(blueprint.plan, summary), *_memory_lines(memory)]))
    if json is not None:
        _write(Path(json), blueprint, summary, memory)


@dataclass(frozen=True)
class Row:
    """A line of the parameter table."""

    name: str
    shape: str
    optimizer: str
    matrices: str
    placement: str
    reason: str


def _rows(blueprint: Blueprint, full: bool) -> list[Row]:
    blocks = {} if blueprint.plan is None else {p.fqn: len(p.stack.blocks) for p in blueprint.plan.parameters}
    rows: dict[Row, int] = {}
    for a in blueprint.assigned:
        name = a.fqn if full else re.sub(r"\.\d+(?=\.|$)", ".*", a.fqn)
        row = Row(
            name,
            "x".join(map(str, a.shape)),
            a.optimizer,
            _matrices(a, blocks.get(a.fqn)),
            _placement(blueprint.parameters[a.fqn]),
            a.reason,
        )
        rows[row] = rows.get(row, 0) + 1
    return [
        Row(f"{row.name}  ({count})" if count > 1 else row.name, *list(asdict(row).values())[1:])
        for row, count in rows.items()
    ]


def _matrices(assignment: Assignment, blocks: int | None) -> str:
    if blocks is None:
        return "-"
    rows, cols = prod(assignment.shape[:-1]) // blocks, assignment.shape[-1]
    return f"{blocks} of {rows}x{cols}"


def _placement(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "whole on each rank"
    names = parameter.device_mesh.mesh_dim_names or [str(i) for i in range(parameter.device_mesh.ndim)]
    sizes = parameter.device_mesh.shape
    parts = [f"{p} {n} {size}" for p, n, size in zip(parameter.placements, names, sizes, strict=True) if size > 1]
    return ", ".join(parts) if parts else "whole"


def _table(rows: Sequence[Row]) -> str:
    header = Row("parameter", "shape", "optimizer", "matrices", "placement", "why")
    cells = [list(asdict(row).values()) for row in (header, *rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _counts(blueprint: Blueprint) -> Iterable[str]:
    total = sum(prod(a.shape) for a in blueprint.assigned)
    yield f"{total:,} parameters on {blueprint.world_size} ranks"
    for optimizer in sorted(blueprint.groups):
        taken = [a for a in blueprint.assigned if a.optimizer == optimizer]
        share = 100 * sum(prod(a.shape) for a in taken) / total
        matrices = f"{len(blueprint.plan.matrices):,} matrices" if optimizer == "muon" and blueprint.plan else ""
        what = matrices if matrices else f"{len(taken):,} tensors"
        yield f"{optimizer}: {what}, {share:.1f} % of parameters"


def _plan_lines(plan: Plan | None, summary: Summary | None) -> Iterable[str]:
    if plan is None or summary is None:
        return
    exchanges = sorted({bucket.exchange for bucket in plan.buckets})
    at_home = sum(1 for ranks in plan.home if ranks)
    yield ""
    yield f"Muon step: {at_home:,} matrices whole at home, {len(plan.matrices) - at_home:,} exchanged" + (
        f" by {', '.join(exchanges)}" if exchanges else ""
    )
    ratio = summary.ns_flops_max / summary.ns_flops_lower_bound
    idle = sum(1 for cost in summary.ranks if cost.matrices == 0)
    path = f"{summary.ns_flops_max / 1e9:,.1f} GFLOP"
    yield f"  Newton-Schulz   {path} on the longest path, {ratio:.3f} x the least possible"
    if idle:
        yield f"  idle ranks      {idle} of {len(summary.ranks)} orthogonalize nothing: fewer matrices than ranks"
    if exchanges:
        yield f"  collectives     {summary.collectives_per_step} per step and rank, {plan.slots} buckets in flight"
        yield f"  sent            {summary.bytes_sent_max / 2**20:,.1f} MiB by the busiest rank, padding 0"
        yield f"  buffers         {summary.buffer_bytes_max / 2**20:,.1f} MiB on the fullest rank"
    for reason in dict.fromkeys(bucket.reason for bucket in plan.buckets if bucket.reason):
        yield f"  exchange        {reason}"


@dataclass(frozen=True)
class Memory:
    """Bytes of rank 0, which holds the largest shards; activations and gathered parameters are not counted."""

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer_states + self.exchange_buffers


def memory_per_rank(blueprint: Blueprint, summary: Summary | None) -> Memory:
    """What rests in memory on rank 0 between steps, and the exchange's buffers."""
    sizes = {name: local(p).numel() * p.element_size() for name, p in blueprint.parameters.items()}
    states = sum(STATES.get(a.optimizer, 0) * sizes[a.fqn] for a in blueprint.assigned)
    held = sum(sizes.values())
    return Memory(held, held, states, 0 if summary is None else summary.buffer_bytes_max)


def _memory_lines(memory: Memory) -> Iterable[str]:
    yield ""
    yield "memory per rank, without activations"
    for name, size in {**asdict(memory), "total": memory.total}.items():
        yield f"  {name.replace('_', ' '):<18}{size / 2**20:>12,.1f} MiB"


def _write(path: Path, blueprint: Blueprint, summary: Summary | None, memory: Memory) -> None:
    document = {
        "world_size": blueprint.world_size,
        "parameters": [asdict(assignment) for assignment in blueprint.assigned],
        "memory": {**asdict(memory), "total": memory.total},
        **({} if summary is None else asdict(summary)),
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"--json {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error
    print(f"\nwrote {path}")
