"""The standard quintic Newton-Schulz iteration of a single matrix, in torch.optim.Muon's arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Coefficients


def reference(matrix: Tensor, steps: Coefficients, eps: float) -> Tensor:
    """Approximately U Vᵀ of matrix = U S Vᵀ, as a new (m, n) bfloat16 tensor; `matrix` (m, n) stays unchanged.

    Equal bit for bit to torch.optim.Muon for the same matrix on the same device. Source: Keller Jordan, "Muon: an
    optimizer for hidden layers in neural networks" (2024).
    """
    tall = matrix.size(0) > matrix.size(1)
    # Always copy: `div_` would scale a bfloat16 momentum in place, as torch.optim.Muon 2.13 does without Nesterov.
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in steps:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
