"""Steps with scaled gradients (torch.amp.GradScaler), or without any change after a norm that is not finite."""

# [Note: skipped steps]
# - If one rank omitted a step after an overflow, the other ranks would wait for shards. So Muon always runs the step,
#   and a skipped step changes no tensor. The decision stays on the device.
# - If the scalers of ranks disagree, the next step raises on all ranks.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..options import MuonOptions, OptionError
from ..step.feature import Feature
from ..step.gradients import Step
from ..step.rule import Group, Rule, Scaling
from ..step.stages import RankStages
from ..step.update import Tensors


class GradScaling(Feature):
    """One step that the device may skip. `found_inf`: positive to skip. `scale`: of the gradients, or None."""

    def __init__(self, rank: RankStages, found_inf: Any, scale: Tensor | None) -> None:
        device, self._rank = rank.device, rank
        # A number, not a tensor, if GradScaler has seen no gradient.
        self.skipped = torch.as_tensor(found_inf, device=device).reshape(()) > 0
        # In double precision, as in GradScaler.unscale_. None if gradients were unscaled already.
        self.inverse = None if scale is None else scale.to(device).reshape(()).double().reciprocal().float()

    @staticmethod
    def check(options: MuonOptions) -> None:
        if options.overlap == "backward":
            raise OptionError("overlap", "= 'backward' would send gradients with a GradScaler's scale; set 'none'")
        if options.overlap == "forward":
            raise OptionError("overlap", "= 'forward' cannot undo a step that a GradScaler skips; set 'none'")

    def before(self, step: Step) -> None:
        self._rank.report.add_skipped(self.skipped)
        self._plain, self._rank.rule = self._rank.rule, ScaledRule(Scaling(self._rank.rule, self.inverse, self.skipped))

    def after(self) -> None:
        self._rank.rule = self._plain


class ScaledRule(Rule):
    """A rule for scaled gradients and skipped steps."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling, rule = scaling, scaling.rule
        self._rule, self._inverse, self._skipped = rule, scaling.inverse, scaling.skipped
        self.states, self.finish_bytes = rule.states, rule.finish_bytes
        self.limits = rule.limits

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """A skipped step uses the averages as gradients, which changes nothing."""
        unscaled = grads if self._inverse is None else torch._foreach_mul(grads, self._inverse)
        inputs = [torch.where(self._skipped, old, new) for old, new in zip(averages, unscaled, strict=True)]
        self._rule.advance(averages, inputs, packed, group)

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        raise AssertionError("overlap = 'backward' is refused with a GradScaler")

    def finish(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        before = {name: state.clone() for name, state in states.items()}
        self._rule.finish(whole, states, group, transposed=transposed)
        for name, state in states.items():
            state.copy_(torch.where(self._skipped, before[name], state))

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        skipped = self._skipped.to(params[0].dtype)
        before = torch._foreach_mul(params, skipped)
        self._rule.apply(params, updates, group, scale, scratch)
        # Exact, because updates are finite and the factors are 0 and 1. PyTorch has no foreach call that selects.
        torch._foreach_mul_(params, 1 - skipped)
        torch._foreach_add_(params, before)
