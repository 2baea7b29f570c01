"""MuonEq (Chang et al., 2026, arXiv:2603.28254), forms R and C: rows or columns of equal norm before Newton-Schulz."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .muon import MuonAlgorithm

if TYPE_CHECKING:
    from ..step.views import Batch

EPS = 1e-8


class MuonEq(MuonAlgorithm):
    """Divides each row of a matrix (an output neuron) by its norm, and then orthogonalizes the matrix."""

    whole = True
    temporary_bytes = 4
    sums_inputs = True

    def prepare(self, batch: Batch, norms: Tensor) -> Tensor:
        for part in batch.parts:
            wide, dim = part.whole.float(), 1 if part.transposed is self.sums_inputs else 2
            part.whole.copy_(wide.div_(torch.linalg.vector_norm(wide, dim=dim, keepdim=True).add_(EPS)))
        # Negative: without an update.
        return torch.where(norms < 0, norms, batch.norms())


class MuonEqColumns(MuonEq):
    """Divides each column of a matrix (an input) by its norm, and then orthogonalizes the matrix."""

    sums_inputs = False
