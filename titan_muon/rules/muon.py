"""Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..options import MuonOptions
from ..step import update
from ..step.rule import Group, Limits, Rule
from ..step.update import Tensors
from ..tensors.storage import STEP


class MuonRule(Rule):
    """Orthogonalized exponential moving average of gradients, with decoupled weight decay; base class of the rules."""

    limits: Limits = "spectrum"

    def __init__(self, options: MuonOptions) -> None:
        self.options = options

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        update.momentum(averages, grads, packed, self.momentum(group), group["nesterov"])

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        update.momentum(averages, grads, packed, self.momentum(group), group["nesterov"], ahead=True)

    def momentum(self, group: Group) -> float:
        """The decay of the momentum in this step, which rises linearly from `momentum_start`."""
        steps, momentum = self.options.momentum_warmup_steps, group["momentum"]
        if not steps or group[STEP] >= steps:
            return momentum
        start = self.options.momentum_start
        return start + (momentum - start) * group[STEP] / steps

    def finish(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        """Do nothing: the orthogonalized matrix is the update."""

    def rates(self, group: Group) -> tuple[float | Tensor, float | Tensor]:
        lr, decay = update.rate(group["lr"]), group["weight_decay"]
        if self.options.decay_follows_lr:
            highest = update.highest_rate(group)
            assert highest is not None, "the step leaves out groups with an unknown highest rate"
            decay = decay * lr / highest if isinstance(highest, Tensor) or highest > 0 else 0.0
        return lr, decay

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """param <- (1 - lr weight_decay) param - lr scale update_factor update. The decay may be cautious."""
        lr, decay = self.rates(group)
        if self.options.cautious:
            update.decay_cautiously(params, updates, lr * decay)
            decay = 0.0
        update.apply(params, updates, lr, scale * self.options.update_factor, decay, scratch)
