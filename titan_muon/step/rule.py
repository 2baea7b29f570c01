"""The arithmetic of an optimizer on the engine: what happens to momentum, to whole matrices and to weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from . import update
from .update import Tensors

Group = Mapping[str, Any]
"""Hyperparameters of a parameter group, by name."""


class Rule(Protocol):
    """The arithmetic of one optimizer. The engine decides where and when each method runs.

    `advance` and `apply` are element-wise, so that any cut of a parameter gives the same bits.
    """

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Advance the momentum in place, and write the input of Newton-Schulz into `packed`.

        Runs on every rank that stores shards. `packed` is empty where another rank packs the same shards.
        """

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Write into `packed` what `advance` will write, bit for bit, and leave the momentum as it is."""

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """Decay weights and add their updates, in place. `scale` is the factor on the learning rate.

        Runs on every rank that stores shards, on tensors of one dtype. `scratch`: memory for the updates in that dtype.
        """


class MuonRule:
    """Muon (Keller Jordan, 2024): an exponential moving average, and decoupled weight decay."""

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Advance the momentum, and pack its blend with the gradient (`nesterov`) or the momentum itself."""
        update.momentum(averages, grads, packed, group["momentum"], group["nesterov"])

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Pack what `advance` will pack."""
        update.pack_ahead(averages, grads, packed, group["momentum"], group["nesterov"])

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """param <- (1 - lr weight_decay) param - lr scale update."""
        update.apply(params, updates, group["lr"], scale, group["weight_decay"], scratch)
