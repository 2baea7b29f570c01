"""NorMuon and AdaMuon: Muon with updates divided by a running root mean square."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..engine.state.states import StateSpec
from ..engine.step.algorithm import Group, Tensors
from ..engine.step.foreach import MomentumCall
from ..engine.step.muon import MuonAlgorithm

SECOND_MOMENT = "second_moment"


class NorMuon(MuonAlgorithm):
    """NorMuon (Li et al., 2025, arXiv:2510.05491, Algorithm 1): updates of equal size for every neuron.

    Divides each row of the orthogonalized matrix by a running root mean square of that row. The second moment v, on the
    matrix's owner, has one float32 number for each row (an output neuron):
    v <- beta2 v + (1 - beta2) mean(O * O over the inputs), O <- O / (sqrt(v) + eps). Then O is scaled to the Frobenius
    norm of an orthogonal matrix, sqrt(min(rows, cols)), so that `adjust_lr_fn` works as for Muon. With
    adjust_lr_fn = "match_rms_adamw" the update equals the paper's.
    """

    # The matrix and its squares in float32.
    temporary_bytes = 8
    eps = 1e-7

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return (StateSpec(SECOND_MOMENT, (cols if transposed else rows,)),)

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        inputs = 1 if transposed else 2
        wide = whole.float()
        self.divide(wide, states[SECOND_MOMENT].unsqueeze(inputs), wide.square().mean(dim=inputs, keepdim=True))
        whole.copy_(wide)

    def divide(self, wide: Tensor, moments: Tensor, squares: Tensor) -> None:
        """Average `squares` into `moments`, divide (count, rows, cols) matrices by the root, and restore their norm."""
        # A zero matrix comes from a missing or non-finite gradient and must not change the moment.
        updated = squares.sum(dim=(1, 2), keepdim=True) > 0
        moments.copy_(torch.where(updated, torch.lerp(moments, squares, 1 - self.options.beta2), moments))
        wide.div_(torch.sqrt(moments, out=squares).add_(self.eps))
        norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
        target = min(wide.shape[1:]) ** 0.5
        wide.mul_(torch.where(norms > 0, target / norms, 0.0)[:, None, None])


class AdaMuon(NorMuon):
    """AdaMuon (Si et al., 2025, arXiv:2507.11005, Algorithm 1): a second moment for each element of the update.

    Orthogonalizes the signs of the momentum. The second moment V has the shape of the matrix in float32:
    V <- beta2 V + (1 - beta2) O * O, O <- O / (sqrt(V) + eps). With adjust_lr_fn = "match_rms_adamw" the update has the
    paper's root mean square of 0.2. The paper has no Nesterov blend and one beta for both moments: nesterov = False and
    beta2 = momentum.
    """

    temporary_bytes = 20
    eps = 1e-8
    gather_kernel = "signs"

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return (StateSpec(SECOND_MOMENT, (rows, cols)),)

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        super().before_gather(call, momentum, grads)
        if call.packed:
            # Signs of finite elements, and NaN for the rest, which the owner reports.
            differences = torch._foreach_sub(call.packed, call.packed)
            torch._foreach_sign_(call.packed)
            torch._foreach_add_(call.packed, differences)

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        wide = whole.float()
        self.divide(wide, states[SECOND_MOMENT], wide.square())
        whole.copy_(wide)
