"""Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..state.rule_states import StateSpec
from ..step import update
from ..step.rule import Group
from ..step.update import Tensors


class MuonRule:
    """Orthogonalized exponential moving average of gradients, with decoupled weight decay.

    Args:
        cautious: whether weight decay is cautious, see `update.decay_cautiously`.
    """

    states: tuple[StateSpec, ...] = ()
    keeps_spectrum = True
    finish_bytes = 0

    def __init__(self, *, cautious: bool) -> None:
        self._cautious = cautious

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Advance the momentum, and pack the momentum or the blend with the gradient (`nesterov`)."""
        update.momentum(averages, grads, packed, group["momentum"], group["nesterov"])

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        update.pack_ahead(averages, grads, packed, group["momentum"], group["nesterov"])

    def finish(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        """Do nothing: the orthogonalized matrix is the update."""

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """param <- (1 - lr weight_decay) param - lr scale update. The decay may be cautious."""
        lr, decay = update.rate(group["lr"]), group["weight_decay"]
        if self._cautious:
            update.decay_cautiously(params, updates, lr * decay)
            decay = 0.0
        update.apply(params, updates, lr, scale, decay, scratch)
