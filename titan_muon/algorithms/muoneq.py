"""MuonEq (Chang et al., 2026, arXiv:2603.28254), forms R, C and RC: balanced rows or columns before Newton-Schulz."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.step.muon import MuonAlgorithm
from ..engine.step.views import Batch

NORM_EPS = 1e-8


class MuonEq(MuonAlgorithm):
    """Divides each row of a matrix (an output neuron) by its norm, and then orthogonalizes the matrix."""

    whole = True
    temporary_bytes = 4
    over_inputs: tuple[bool, ...] = (True,)
    """For each division, whether a norm is of the inputs of an output."""

    def prepare(self, batch: Batch, norms: Tensor) -> Tensor:
        for part in batch.parts:
            wide, dims = part.whole.float(), [1 if part.transposed is inputs else 2 for inputs in self.over_inputs]
            # All of the matrix before a division.
            for length in [torch.linalg.vector_norm(wide, dim=dim, keepdim=True) for dim in dims]:
                wide.div_(length.add_(NORM_EPS))
            part.whole.copy_(wide)
        # Negative: without an update.
        return torch.where(norms < 0, norms, batch.norms())


class MuonEqColumns(MuonEq):
    """Divides each column of a matrix (an input) by its norm, and then orthogonalizes the matrix."""

    over_inputs = (False,)


class MuonEqBoth(MuonEq):
    """Divides each element by the norms of its row and of its column, and then orthogonalizes the matrix."""

    over_inputs = (True, False)
