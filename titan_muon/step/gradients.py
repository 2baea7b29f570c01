"""The input of a step: gradients and excluded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.terms.types import Parameter
from ..tensors.dtensor import local
from ..tensors.storage import TrainedParam, matrix_size


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step, by parameter.

    Attributes:
        grads: (rows, cols) local gradient; None if missing or released, or the parameter is excluded.
        excluded: parameters without an update or decay. Other parameters decay even without a gradient.
        uniform: whether all gradients exist, in one dtype.
        params: the parameters, whose gradients `release` frees.
    """

    grads: list[Tensor | None]
    excluded: frozenset[int]
    uniform: bool
    params: Sequence[TrainedParam] = ()

    def dtype(self, parameter: int) -> torch.dtype | None:
        grad = self.grads[parameter]
        return None if grad is None else grad.dtype

    def release(self, parameters: Iterable[int]) -> None:
        """Free these gradients."""
        for index in parameters:
            if self.grads[index] is not None:
                self.grads[index] = None
                self.params[index].param.grad = None


def check_first_gradients(params: Sequence[TrainedParam]) -> None:
    """Raise ValueError if no parameter on this rank has a gradient in the first step."""
    trained = [param for param in params if param.on_mesh]
    if trained and all(param.param.grad is None for param in trained):
        raise ValueError(
            f"no gradient for {trained[0].fqn} or any other parameter of Muon in the first step: either backward did "
            "not run, or other tensors replaced these parameters in the model after Muon was made. Make Muon from the "
            "parameters of the sharded model, after fully_shard, own and the like"
        )


def grad_matrix(grad: Tensor | None, planned: Parameter) -> Tensor | None:
    """(rows, cols)."""
    if grad is None:
        return None
    stored = local(grad)
    # The step only reads gradients.
    return stored if stored.ndim == 2 else stored.reshape(matrix_size(stored, planned))
