"""What checks of a plan read, and the checks of options for states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..options import MuonOptions, OptionError
from ..orthogonalize import Iteration
from ..plan.terms.types import Parameter, Plan
from ..tensors.mesh import without_groups
from .eight_bit import BLOCK


@dataclass(frozen=True)
class PlanContext:
    """A plan before its first step, equal on all ranks.

    Attributes:
        parameters: before replicas share the momentum, or tensor parallelism cuts matrices.
        named: (name, parameter) in the plan's order, perhaps on the meta device.
        iterations: by parameter.
        device: type of the device that runs the step.
    """

    options: MuonOptions
    parameters: Sequence[Parameter]
    plan: Plan
    named: Sequence[tuple[str, Tensor]]
    iterations: Sequence[Iteration]
    device: str

    @property
    def sliced(self) -> list[str]:
        """Names of parameters with sliced matrices."""
        numbers = sorted({matrix.parameter for matrix in self.plan.matrices if matrix.slice is not None})
        return [self.plan.parameters[number].fqn for number in numbers]


def check_states(context: PlanContext) -> None:
    """Raise OptionError if states cannot be on the host, in 8 bits, or on the owner alone, as the options say."""
    options = context.options
    if options.offload != "none":
        _check_offload(context.parameters, options)
    for name, needed in (("offload", "none"), ("state", "replicated")) if options.state_dtype == "int8" else ():
        value = getattr(options, name)
        if value != needed:
            problem = f"= {value!r} does not take state_dtype = 'int8'; set {needed!r}, or 'bfloat16'"
            raise OptionError(name, problem)
    for (fqn, tensor), planned in zip(context.named, context.parameters, strict=True):
        if options.state_dtype == "int8" and (problem := _cut_blocks(tensor, planned)):
            text = f"= 'int8' has a scale for {BLOCK} columns of a row, and {problem}; set 'bfloat16'"
            raise OptionError("state_dtype", text)
        if options.state == "owner" and without_groups(tensor):
            problem = f"{fqn} is owned, and its momentum is on its owner alone already"
            raise OptionError("state", f'= "owner": {problem}; set "replicated"')


def _check_offload(parameters: Iterable[Parameter], options: MuonOptions) -> None:
    if options.overlap != "none" and (options.overlap, options.offload) != ("forward", "state"):
        problem = f"= {options.overlap!r} needs momentum and parameters on the device; set 'none', or offload = 'none'"
        raise OptionError("overlap", problem)
    # Transfers move whole rows, so two transfers would overwrite common rows.
    if shared := next((parameter.fqn for parameter in parameters if parameter.stack.interleaved), None):
        problem = f'= "{options.offload}" does not take {shared}, whose matrices share rows of its storage; set "none"'
        raise OptionError("offload", problem)


def _cut_blocks(tensor: Tensor, planned: Parameter) -> str:
    """Why 8-bit blocks of a parameter would cross shards or matrices; empty if not."""
    cut = 1
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.mesh.shape, strict=True):
            cut *= size if isinstance(placement, Shard) and placement.dim == tensor.ndim - 1 else 1
    columns = tensor.shape[-1]
    if planned.stack.interleaved:
        return f"{planned.fqn} has matrices that share rows"
    if (cut > 1 or planned.stack.row_dims < tensor.ndim - 1) and columns % (BLOCK * cut):
        return f"{planned.fqn} has {columns} columns on {cut} ranks, which cut blocks"
    return ""
