"""Accuracy of an orthogonalization, for benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonality_error(matrix: Tensor) -> Tensor:
    """|X Xᵀ - I| / |I| in the Frobenius norm on the smaller side, of each matrix (..., rows, cols); float32 or wider.

    0 for an orthogonal matrix. After Newton-Schulz singular values lie in a band around 1, so the error is not 0.
    """
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    eye = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    return torch.linalg.matrix_norm(x @ x.mT - eye) / torch.linalg.matrix_norm(eye)


def singular_band(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest singular value of each matrix (..., rows, cols), in float32 or wider."""
    values = torch.linalg.svdvals(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    return values[..., -1], values[..., 0]


def relative_error(result: Tensor, expected: Tensor) -> Tensor:
    """|result - expected| / max(|expected|, 1) in the Frobenius norm, of each matrix (..., rows, cols), in float64.

    A single singular value of 1 has the norm 1. High-pass coefficients may send all of them to 0.
    """
    wide = expected.double()
    return torch.linalg.matrix_norm(result.double() - wide) / torch.linalg.matrix_norm(wide).clamp(min=1)
