"""AdaMuon (Si et al., 2025, arXiv:2507.11005, Algorithm 1): a second moment for each element of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..state.matrix_states import StateSpec
from ..step.algorithm import Group, Tensors
from .muon import MuonAlgorithm

if TYPE_CHECKING:
    from ..step.foreach import MomentumCall

SECOND_MOMENT = "second_moment"
EPS = 1e-8


class AdaMuon(MuonAlgorithm):
    """Orthogonalizes the signs of the momentum, then divides each element by a running root mean square.

    The second moment V, on the matrix's owner, has the shape of the matrix in float32:
    V <- beta2 V + (1 - beta2) O * O, O <- O / (sqrt(V) + eps). Then O is scaled to the Frobenius norm of an orthogonal
    matrix, sqrt(min(rows, cols)), so that adjust_lr_fn = "match_rms_adamw" gives the paper's root mean square of 0.2.
    The paper has no Nesterov blend and one beta for both moments: nesterov = False and beta2 = momentum.
    """

    limits = "norm"
    temporary_bytes = 20

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return (StateSpec(SECOND_MOMENT, (rows, cols)),)

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors, *, ahead: bool = False) -> None:
        super().before_gather(call, momentum, grads, ahead=ahead)
        _to_signs(call.packed)

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        moments, wide = states[SECOND_MOMENT], whole.float()
        squares = wide.square()
        # A zero matrix comes from a missing or non-finite gradient and must not change the moment.
        updated = squares.sum(dim=(1, 2), keepdim=True) > 0
        moments.copy_(torch.where(updated, torch.lerp(moments, squares, 1 - self.options.beta2), moments))
        wide.div_(torch.sqrt(moments, out=squares).add_(EPS))
        norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
        target = min(whole.shape[1:]) ** 0.5
        whole.copy_(wide.mul_(torch.where(norms > 0, target / norms, 0.0)[:, None, None]))


def _to_signs(packed: Tensors) -> None:
    """Replace finite elements by signs, and the rest by NaN, which the owner reports."""
    if packed:
        differences = torch._foreach_sub(packed, packed)
        torch._foreach_sign_(packed)
        torch._foreach_add_(packed, differences)
