"""The gradients of a step on this rank, as matrices of local storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.terms.types import Parameter
from ..tensors.dtensor import local
from ..tensors.storage import TrainedParam, matrix_size
from .scaling import Scaling


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, by parameter.

    Attributes:
        stored: (rows, cols) local gradient; None if it is missing or released, or if the parameter is left alone.
        left: parameters that are left alone. Those whose gradient is missing are decayed.
        uniform: whether all parameters that are here have one, all in one dtype.
        scaling: what a GradScaler says of them.
    """

    stored: list[Tensor | None]
    left: frozenset[int]
    uniform: bool
    scaling: Scaling | None

    def dtype(self, parameter: int) -> torch.dtype | None:
        """The dtype of a gradient, None without one."""
        grad = self.stored[parameter]
        return None if grad is None else grad.dtype


def gradients(
    params: Sequence[TrainedParam], plan: Sequence[Parameter], left: frozenset[int], scaling: Scaling | None
) -> Gradients:
    """The gradients of the parameters but of those that are left alone."""
    stored = [
        grad_matrix(trained.param.grad, planned) if index not in left and trained.here else None
        for index, (trained, planned) in enumerate(zip(params, plan, strict=True))
    ]
    dtypes = {
        None if grad is None else grad.dtype for grad, trained in zip(stored, params, strict=True) if trained.here
    }
    return Gradients(stored, left, None not in dtypes and len(dtypes) <= 1, scaling)


def grad_matrix(grad: Tensor | None, planned: Parameter) -> Tensor | None:
    """The (rows, cols) local gradient of a parameter, if there is one."""
    if grad is None:
        return None
    stored = local(grad)
    # A gradient is only read, so that a copy does where a view cannot be had.
    return stored if stored.ndim == 2 else stored.reshape(matrix_size(stored, planned))
