"""The parameter table, and notes and warnings about assignments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.layout.types import MatrixStack, Plan
from ..engine.tensors.names import families, family, listed
from ..matrices.stacks import matrix_shapes, stack_of
from ..options import Split
from ..owned import is_owned
from ..owned.param import holders
from ..selection import doubts_about
from .groups import ParamGroup
from .rules import EMBEDDING, HEAD, Assignment, splits_with

LEAST_SHARE = 0.9
"""Least share of Muon without a warning."""
OUTSIDE = ("embedding", "head", "table")

HEADER = ("parameter", "shape", "optimizer", "matrices", "placement", "why")


def parameter_table(
    assigned: Sequence[Assignment],
    parameters: Mapping[str, Tensor],
    plan: Plan | None,
    *,
    full: bool,
    splits: Sequence[Split] = (),
) -> str:
    """The table. Without `full`, equal parameters of all layers share a line. `splits`: of Muon without a plan."""
    blocks = {a.fqn: stack_of(a.fqn, a.shape, splits) for a in assigned if a.optimizer == "muon"}
    if plan is not None:
        blocks = {p.fqn: p.stack for p in plan.parameters}
    counts = Counter[tuple[str, ...]]()
    for a in assigned:
        shape, matrices = "x".join(map(str, a.shape)), _matrices(a, blocks.get(a.fqn))
        placement = _placement(parameters[a.fqn], full)
        counts[a.fqn if full else family(a.fqn), shape, a.optimizer, matrices, placement, a.reason] += 1
    rows = ((f"{name}  ({n})" if n > 1 else name, *others) for (name, *others), n in counts.items())
    lines = [HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def decay_lines(*optimizers: Mapping[str, Iterable[ParamGroup]]) -> list[str]:
    """A line for the vectors without weight decay, if any; from the groups by optimizer."""
    every = (group for groups in optimizers for of_optimizer in groups.values() for group in of_optimizer)
    count = sum(len(group.names) for group in every if group.spared)
    return [f"no weight decay: {count} norms, biases and other vectors (decay_vectors = false)"] if count else []


def frozen_lines(names: Sequence[str]) -> list[str]:
    """A line for the frozen parameters, if any."""
    return [f"not trained (requires_grad is False): {listed(names)}"] if names else []


def _matrices(assignment: Assignment, stack: MatrixStack | None) -> str:
    if stack is None:
        return "-"
    counts = Counter(matrix_shapes(assignment.shape, stack))
    return ", ".join(f"{count} of {rows}x{cols}" for (rows, cols), count in counts.items())


def _placement(parameter: Tensor, full: bool) -> str:
    if not isinstance(parameter, DTensor):
        return "whole on each rank"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)]
    axes = zip(parameter.placements, names, mesh.shape, strict=True)
    parts = [f"{placement} {name} {size}" for placement, name, size in axes if size > 1]
    if is_owned(parameter):
        # Ranks only with `full`, because owners differ between layers.
        parts.insert(0, f"owned by rank {', '.join(map(str, holders(parameter)))}" if full else "owned")
    return ", ".join(parts) if parts else "whole"


def split_lines(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Automatically split parameters, a line for each layout."""
    known = {split.match: split for split in splits_with(splits, assigned)[len(splits) :]}
    by_layout: dict[str, list[str]] = {}
    for fqn, split in known.items():
        lengths = ", ".join(f"{axis} = {length}" for axis, length in split.lengths.items())
        by_layout.setdefault(f"{split.dims}{f' with {lengths}' if lengths else ''}", []).append(fqn)
    for layout, names in by_layout.items():
        yield f"split, as its layout is known: {families(names)} as {layout}"


def doubts(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Warnings if Muon takes few parameters, thin matrices, or only some matrices of a family."""
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    muon_elements = sum(prod(a.shape) for a in inside if a.optimizer == "muon")
    total = sum(prod(a.shape) for a in inside)
    if total and muon_elements < LEAST_SHARE * total:
        left = sorted((a for a in inside if a.optimizer != "muon"), key=lambda a: -prod(a.shape))
        yield (
            f"warning: Muon takes {100 * muon_elements / total:.1f} % of the parameters besides embeddings and output "
            f"head; the largest of the rest: {families(a.fqn for a in left)}"
        )
    all_splits = splits_with(splits, assigned)
    shapes = {a.fqn: a.shape for a in assigned if a.optimizer == "muon"}
    experts = {a.fqn for a in assigned if a.role == "experts"}
    yield from (f"warning: {doubt}" for doubt in doubts_about(shapes, all_splits, experts))
    takers: dict[str, set[str]] = {}
    for a in assigned:
        takers.setdefault(family(a.fqn), set()).add(a.optimizer)
    if divided := {name: f" ({', '.join(sorted(names))})" for name, names in takers.items() if len(names) > 1}:
        yield f"warning: matrices of one name go to different optimizers: {families(divided, divided)}"
