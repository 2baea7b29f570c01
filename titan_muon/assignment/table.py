"""The parameter table: optimizer, matrices, placement and reason of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..owned import is_owned
from ..owned.param import holders
from ..plan import Plan
from ..plan.terms.types import MatrixStack
from ..tensors.matrices import matrix_shapes
from ..tensors.names import listed
from .doubts import family
from .groups import ParamGroup
from .rules import Assignment


@dataclass(frozen=True)
class ParameterRow:
    """A line of the parameter table."""

    name: str
    shape: str
    optimizer: str
    matrices: str
    placement: str
    reason: str


HEADER = ParameterRow("parameter", "shape", "optimizer", "matrices", "placement", "why")


def parameter_table(
    assigned: Sequence[Assignment], parameters: Mapping[str, Tensor], plan: Plan | None, *, full: bool
) -> str:
    """The table. Without `full`, equal parameters of all layers share a line."""
    lines = [astuple(row) for row in (HEADER, *parameter_rows(assigned, parameters, plan, full=full))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def parameter_rows(
    assigned: Sequence[Assignment], parameters: Mapping[str, Tensor], plan: Plan | None, *, full: bool
) -> list[ParameterRow]:
    """The lines of `parameter_table`."""
    blocks = {} if plan is None else {p.fqn: p.stack for p in plan.parameters}
    counts: Counter[ParameterRow] = Counter()
    for a in assigned:
        name = a.fqn if full else family(a.fqn)
        shape, placement = "x".join(map(str, a.shape)), _placement(parameters[a.fqn], full)
        counts[ParameterRow(name, shape, a.optimizer, _matrices(a, blocks.get(a.fqn)), placement, a.reason)] += 1
    return [replace(row, name=f"{row.name}  ({n})" if n > 1 else row.name) for row, n in counts.items()]


def decay_lines(groups: Iterable[ParamGroup]) -> list[str]:
    """A line for the vectors without weight decay, if any."""
    count = sum(len(group.names) for group in groups if group.spared)
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
