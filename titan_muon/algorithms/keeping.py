"""A decorator for matrices that a step skips: momentum and weights stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..step.algorithm import Algorithm, Decorated, Tensors

if TYPE_CHECKING:
    from ..step.foreach import MomentumCall, Rectangle, UpdateCall


class Keeping(Decorated):
    """`skipped`: (matrices,) bool on the device, or () for all of them. Read at each call.

    The updates of skipped matrices are zero, because the mask has zeroed them.
    """

    def __init__(self, inner: Algorithm, skipped: Tensor) -> None:
        super().__init__(inner)
        self._skipped = skipped
        self._by_matrix = skipped.unbind() if skipped.dim() else ()

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        if momentum[0].shape == grads[0].shape:
            # With the momentum as its gradient, the momentum does not change.
            parts = zip(call.parts, momentum, grads, strict=True)
            grads = [torch.where(self._flag(part), old, new) for part, old, new in parts]
        super().before_gather(call, momentum, grads)

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        before = [torch.empty_like(param) for param in params]
        torch._foreach_copy_(before, params)
        super().after_return(call, params)
        for part, old, param in zip(call.parts, before, params, strict=True):
            torch.where(self._flag(part), old, param, out=param)

    def _flag(self, part: Rectangle) -> Tensor:
        return self._by_matrix[part.matrix] if self._by_matrix else self._skipped
