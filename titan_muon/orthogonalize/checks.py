"""What can be said about a matrix before and after orthogonalization."""

from __future__ import annotations

import torch
from torch import Tensor


def silence(stack: Tensor) -> Tensor:
    """Set each matrix of `stack` (count, rows, cols) whose Frobenius norm is not finite to zero, in place.

    That is one with an element that is not finite, or with elements around 1e19 and beyond, which Newton-Schulz could
    not normalize. Returns which they are, (count,) bool on the stack's device; the host does not wait for a GPU.
    """
    wide = torch.float32 if stack.dtype == torch.float16 else None
    broken = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=wide).isfinite().logical_not_()
    # To ask a GPU would be to wait for it.
    if stack.device.type != "cpu" or broken.any():
        stack.masked_fill_(broken[:, None, None], 0)
    return broken


def orthogonality_error(matrix: Tensor) -> Tensor:
    """|X Xᵀ - I| / |I| in the Frobenius norm on the smaller side, of each matrix (..., rows, cols); float32 or wider.

    0 for an orthogonal matrix. Newton-Schulz's singular values are in a band around 1, so after it this is not 0.
    """
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    eye = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    return torch.linalg.matrix_norm(x @ x.mT - eye) / torch.linalg.matrix_norm(eye)


def singular_band(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest singular value of each matrix (..., rows, cols), in float32 or wider."""
    values = torch.linalg.svdvals(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    return values[..., -1], values[..., 0]


def relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected| / |expected| in the Frobenius norm, of each matrix (..., rows, cols), in float64."""
    wide = expected.double()
    return torch.linalg.matrix_norm(found.double() - wide) / torch.linalg.matrix_norm(wide)
