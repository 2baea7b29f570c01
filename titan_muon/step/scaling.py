"""Steps under a GradScaler: gradients that carry its scale, and steps that must change nothing."""

# [Note: a step that is skipped]
# - GradScaler leaves out the step of an optimizer that knows nothing of it. Were one rank to leave out Muon's, the
#   others would wait for its pieces. So Muon always steps, and a step that is skipped changes nothing.
# - Whether it is skipped is on the device, and the host does not wait for it. What is computed is the same either way.
# - Ranks whose scalers disagree are told of it in the next step, as of any other fault.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from .update import Tensors


@dataclass(frozen=True)
class Scaling:
    """What a GradScaler says of a step.

    Attributes:
        inverse: what the gradients have to be multiplied with, or None if they were unscaled already.
        skipped: () bool: whether it has found a gradient on this rank that is not finite.
    """

    inverse: Tensor | None
    skipped: Tensor

    @classmethod
    def asked_of(cls, optimizer: Optimizer, device: torch.device) -> Scaling | None:
        """What torch.amp.GradScaler sets on an optimizer for the time of a step, or None without one."""
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is None:
            return None
        # A number where the scaler has seen no gradient.
        skipped = torch.as_tensor(found, device=device).reshape(()) > 0
        # In double precision, as GradScaler.unscale_ inverts.
        inverse = None if scale is None else scale.to(device).reshape(()).double().reciprocal().float()
        return cls(inverse, skipped)

    def unscaled(self, grads: Tensors, averages: Tensors) -> list[Tensor]:
        """Gradients without the scale. In a step that is skipped they are their averages, which therefore stay."""
        scaled = grads if self.inverse is None else torch._foreach_mul(grads, self.inverse)
        return [torch.where(self.skipped, average, grad) for average, grad in zip(averages, scaled, strict=True)]

    def unless_skipped(self, params: Tensors, change: Callable[[], None]) -> None:
        """Change parameters, and take it back if the step is skipped."""
        before = [param.clone() for param in params]
        change()
        for param, kept in zip(params, before, strict=True):
            param.copy_(torch.where(self.skipped, kept, param))
