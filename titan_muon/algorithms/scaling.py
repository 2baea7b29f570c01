"""Steps with scaled gradients (torch.amp.GradScaler), or without any change after a norm that is not finite."""

# [Note: skipped steps]
# - If one rank omitted a step after an overflow, the other ranks would wait for shards. So Muon always runs the step,
#   and a skipped step changes no tensor. The decision stays on the device.
# - If the scalers of ranks disagree, the next step raises on all ranks.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..orthogonalize import NO_UPDATE
from ..step.algorithm import Algorithm, Decorated, Scaling, Tensors
from ..step.gradients import StepGradients
from ..step.step import UpdateMask
from ..tensors.device import may_be_true
from .keeping import Keeping

if TYPE_CHECKING:
    from ..step.foreach import MomentumCall
    from ..step.views import Batch


def scaling_of(found_inf: Any, scale: Tensor | None, device: torch.device, broken: Tensor | None = None) -> Scaling:
    """The step of a torch.amp.GradScaler.

    `found_inf`: positive to skip. `scale`: of the gradients, if not unscaled. `broken`: () bool, to skip too.
    """
    # A number, not a tensor, if GradScaler has seen no gradient.
    skipped = torch.as_tensor(found_inf, device=device).reshape(()) > 0
    # The scaler looks at this rank's gradients, and the norm at those of all ranks.
    skipped = skipped if broken is None else skipped | broken.to(device)
    # In double precision, as in GradScaler.unscale_.
    inverse = None if scale is None else scale.to(device).reshape(()).double().reciprocal().float()
    return Scaling(skipped, inverse)


def scaled(algorithm: Algorithm, scaling: Scaling) -> Algorithm:
    """An algorithm for one step, by decorators."""
    kept = Keeping(algorithm, scaling.skipped)
    return kept if scaling.inverse is None else Unscaled(kept, scaling.inverse)


class Unscaled(Decorated):
    """`inverse`: () float32 factor on the gradients."""

    def __init__(self, inner: Algorithm, inverse: Tensor) -> None:
        super().__init__(inner)
        self._inverse = inverse

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        super().before_gather(call, momentum, torch._foreach_mul(grads, self._inverse))


class SkippedStepMask(UpdateMask):
    """Zeroes every matrix of a skipped step, and the matrices without an update by `inner`."""

    def __init__(self, inner: UpdateMask, skipped: Tensor) -> None:
        super().__init__(inner.report)
        self._inner, self._skipped = inner, skipped

    def zero_(self, batch: Batch, gradients: StepGradients) -> Tensor:
        if may_be_true(self._skipped):
            batch.whole.masked_fill_(self._skipped, 0)
        return self._inner.zero_(batch, gradients).masked_fill_(self._skipped, NO_UPDATE)
