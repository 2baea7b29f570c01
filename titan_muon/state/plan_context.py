"""What checks of a plan read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..options import MuonOptions
from ..orthogonalize import Iteration
from ..plan.terms.types import Parameter, Plan


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
