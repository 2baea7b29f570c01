"""The standard Newton-Schulz iteration on stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import PLAIN, Products


def standard(stack: Tensor, steps: Coefficients, eps: float, dtype: torch.dtype, products: Products = PLAIN) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype, new memory.

    X <- a X + (b A + c A A) X with A = X Xᵀ, from X = matrix / max(norm, eps), on the smaller side, in `dtype`. Source:
    Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    return restored(_iterated(normalized(stack, eps, dtype), steps, products), stack)


def _iterated(x: Tensor, steps: Coefficients, products: Products) -> Tensor:
    following = torch.empty_like(x)
    gram = x.new_empty(x.size(0), x.size(1), x.size(1))
    polynomial = torch.empty_like(gram)
    for a, b, c in steps:
        products.gram(x, out=gram)
        if c == 0:
            torch.mul(gram, b, out=polynomial)
        else:
            products.symmetric(gram, gram, gram, alpha=c, beta=b, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=following)
        x, following = following, x
    return x


def normalized(stack: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Each matrix over max(its Frobenius norm, eps), the smaller side first, as new (count, m, n) memory in `dtype`.

    The norm is taken in float32, and divided by in float32 unless that changes no dtype with float32's range: so no
    finite matrix overflows or vanishes. A tall matrix stays as it lies in memory, multiplied as a transposed view.
    """
    x = stack.mT if stack.size(1) > stack.size(2) else stack
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = norm.clamp_(min=eps).reciprocal_()
    if x.dtype == dtype != torch.float16:
        # A wider factor would make the CPU hold all of X in float32.
        scale = scale.to(dtype)
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def restored(x: Tensor, stack: Tensor) -> Tensor:
    """(count, m, n) in the shape and dtype of `stack`."""
    return (x.mT if stack.size(1) > stack.size(2) else x).to(stack.dtype)
