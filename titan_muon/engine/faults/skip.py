"""The flag by which all ranks skip a step: a norm that is not finite, a GradScaler, or a bad gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensors.dtensor import may_be_true
from ..tensors.names import named_parameters, warn
from ..tensors.process_groups import ranks_of
from .faults import NotFiniteError


class CheckedNorm(Protocol):
    """The gradient norm of a step. `broken`: () bool on the device, whether the norm is not finite."""

    broken: Tensor

    def causes(self) -> str | None:
        """The parameters and ranks of a norm that is not finite, once; else None. Collective."""


@dataclass(frozen=True)
class Scaling:
    """A step that may change nothing.

    Attributes:
        skipped: () bool on the device, equal on all ranks.
        inverse: () float32 factor on the gradients, or None.
        differs: () bool: whether only a GradScaler of another rank has found a bad gradient, or None.
    """

    skipped: Tensor
    inverse: Tensor | None = None
    differs: Tensor | None = None


class SkipsSteps:
    """An optimizer with steps that may change nothing. `process_group`: its ranks, by default all.

    One flag skips a step on all ranks: a norm that is not finite (`skip_unless_finite`), the `found_inf` of a
    torch.amp.GradScaler, or a bad gradient with `on_bad_gradient = "skip_step"`.
    """

    process_group: dist.ProcessGroup | None = None
    _next_norm: CheckedNorm | None = None
    _last_norm: CheckedNorm | None = None
    _given: tuple[Scaling | None] | None = None

    def prepare_step(self) -> Tensor | None:
        """Raise ValueError for the last step, and take the gradients of this step.

        Returns () bool on the device: whether a gradient on this rank is to skip the step; None if none can.
        """
        raise NotImplementedError

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        groups: Sequence[Mapping[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        names = {p: name for name, p in named_parameters(group for group in groups if "param_names" in group)}
        return [names.get(parameter, "a parameter without a name") for parameter in parameters]

    def skip_unless_finite(self, norm: CheckedNorm) -> None:
        """Let the next step change nothing if the norm is not finite. The host does not wait."""
        self._next_norm = norm

    def give_scaling(self, scaling: Scaling | None) -> None:
        """Let the next step of this prepared optimizer use the flag of a Hybrid."""
        self._given = (scaling,)

    def take_scaling(self, device: torch.device, *, alone: bool = False) -> Scaling | None:
        """The flag of this step: a Hybrid's, or one on which all ranks agree now. None for a plain step.

        `alone`: leave out the other ranks.
        """
        given, self._given = self._given, None
        return agreed_scaling(self, [self], device, alone=alone) if given is None else given[0]

    def check_norm(self, *, skips: bool) -> None:
        """Raise NotFiniteError on all ranks if the last norm was not finite; warn if `skips`. Collective."""
        last, self._last_norm = self._last_norm, None
        causes = None if last is None else last.causes()
        if causes is None:
            return
        text = f"the norm of the gradients was not finite ({causes}), and the step changed no weight"
        if not skips:
            raise NotFiniteError(
                f"{text}; lower the learning rate, clip gradients, or go on after such steps "
                "(expert.on_bad_gradient = 'skip_step')"
            )
        warn(text)


def agreed_scaling(
    scaler: Any, optimizers: Sequence[SkipsSteps], device: torch.device, *, alone: bool = False
) -> Scaling | None:
    """Prepare a step of the optimizers together, and return its flag, on which all ranks agree. None: a plain step.

    `scaler`: has `found_inf` and `grad_scale` of a torch.amp.GradScaler, if one drives the step. `alone`: the ranks do
    not agree about `found_inf`.
    """
    bad = [flag.to(device) for optimizer in optimizers if (flag := optimizer.prepare_step()) is not None]
    for optimizer in optimizers:
        optimizer._last_norm, optimizer._next_norm = optimizer._next_norm, None
    norms = [norm.broken.to(device) for optimizer in optimizers if (norm := optimizer._last_norm) is not None]
    found_inf = getattr(scaler, "found_inf", None)
    if found_inf is None and not bad:
        # A norm is equal on all ranks.
        return Scaling(norms[0]) if norms and may_be_true(norms[0]) else None
    # A number, not a tensor, if GradScaler has seen no gradient.
    found = torch.as_tensor(0.0 if found_inf is None else found_inf, device=device).reshape(()) > 0
    flags = torch.stack([found, torch.stack(bad).any() if bad else torch.zeros_like(found)]).int()
    group = scaler.process_group
    if (bad or not alone) and dist.is_initialized() and len(ranks_of(group)) > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    agreed = flags > 0
    skipped = torch.stack([*agreed.unbind(), *norms]).any()
    scale = getattr(scaler, "grad_scale", None)
    # In double precision, as in GradScaler.unscale_.
    inverse = None if scale is None else scale.to(device).reshape(()).double().reciprocal().float()
    return Scaling(skipped, inverse, agreed[0] & ~found)
