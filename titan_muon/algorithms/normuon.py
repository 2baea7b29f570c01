"""NorMuon (Li et al., 2025, arXiv:2510.05491, Algorithm 1): Muon with updates of equal size for every neuron."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..state.matrix_states import StateSpec
from ..step.algorithm import Group
from .muon import MuonAlgorithm

SECOND_MOMENT = "second_moment"
EPS = 1e-7


class NorMuon(MuonAlgorithm):
    """Divides each row of the orthogonalized matrix by a running root mean square of that row.

    The second moment v, on the matrix's owner, has one float32 number for each row (an output neuron):
    v <- beta2 v + (1 - beta2) mean(O * O over the inputs), O <- O / (sqrt(v) + eps). Then O is scaled to the Frobenius
    norm of an orthogonal matrix, sqrt(min(rows, cols)), so that `adjust_lr_fn` works as for Muon. With
    adjust_lr_fn = "match_rms_adamw" the update equals the paper's.
    """

    limits = "norm"
    # The matrix and its squares in float32.
    temporary_bytes = 8

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return (StateSpec(SECOND_MOMENT, (cols if transposed else rows,)),)

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        moments, eps = states[SECOND_MOMENT], EPS
        wide = whole.float()
        inputs = 1 if transposed else 2
        squares = wide.square().mean(dim=inputs)
        # A zero matrix comes from a missing or non-finite gradient and must not change the moment.
        updated = squares.sum(dim=1, keepdim=True) > 0
        moments.copy_(torch.where(updated, torch.lerp(moments, squares, 1 - self.options.beta2), moments))
        wide.div_(moments.sqrt().add_(eps).unsqueeze(inputs))
        norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
        target = min(whole.shape[1:]) ** 0.5
        whole.copy_(wide.mul_(torch.where(norms > 0, target / norms, 0.0)[:, None, None]))
