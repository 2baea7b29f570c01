"""The interface of update rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from ..comm.agreement import Agreement
from ..state.rule_states import StateSpec
from .update import Tensors

Group = Mapping[str, Any]
Limits = Literal["spectrum", "norm", "nothing"]


class Rule(Protocol):
    """The arithmetic of an optimizer. The engine decides where and when each method runs.

    `advance`, `pack` and `apply` run on every holder, element-wise, so that any sharding gives the same bits. `finish`
    runs on the owner, on whole matrices, if the rule has states.

    Attributes:
        states: of each matrix besides the momentum.
        limits: bound on finished matrices: the singular values of an orthogonalized matrix, its norm, or none.
        finish_bytes: temporary bytes of `finish` for an element of a matrix.
        scaling: of a step with scaled gradients.
    """

    states: tuple[StateSpec, ...] = ()
    limits: Limits = "nothing"
    finish_bytes: int = 0
    scaling: Scaling | None = None

    def check(self, group: Group) -> None:
        """Raise OptionError for hyperparameters that the rule cannot use."""
        return None

    def feature(self, agreement: Agreement) -> Any:
        """A `Feature` that wraps the stages of a step, or None."""
        return None

    def advance(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """Advance the momentum in place, and write the input of Newton-Schulz into `packed`.

        `packed` is empty where another rank packs equal shards.
        """

    def pack(self, averages: Tensors, grads: Tensors, packed: Tensors, group: Group) -> None:
        """As `advance`, but keep the momentum."""

    def finish(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        """Turn orthogonalized matrices into updates, in place, and advance their states.

        Args:
            whole: (count, rows, cols) matrices of one parameter group.
            states: by name, (count, outputs) or (count, rows, cols) float32.
            transposed: whether the outputs are the columns.
        """

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """Decay weights and add their updates, in place.

        Args:
            params: parts of weights, of one dtype.
            updates: the same parts of orthogonalized matrices, of one dtype.
            scale: factor on the learning rate.
            scratch: memory for the updates in the dtype of the weights, if wider.
        """


@dataclass(frozen=True)
class Scaling:
    """A step with scaled gradients, or a step that the device may skip.

    `rule`: of other steps. `inverse`: () float32 factor on the gradients, or None. `skipped`: () bool, on the device.
    """

    rule: Rule
    inverse: Tensor | None
    skipped: Tensor
