"""The standard Newton-Schulz iteration on stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import PLAIN, Products, multiply, polynomial, smaller_first


def standard(stack: Tensor, steps: Coefficients, eps: float, dtype: torch.dtype, products: Products = PLAIN) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype, new memory.

    X <- a X + (b A + c A A) X with A = X Xᵀ, from X = matrix / max(norm, eps), on the smaller side, in `dtype`. Source:
    Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    return _iterated(normalized(stack, eps, dtype), steps, products).to(stack.dtype)


def _iterated(x: Tensor, steps: Coefficients, products: Products) -> Tensor:
    # Two buffers that take turns: a product cannot be written over its own operand.
    following = torch.empty_like(x)
    gram = x.new_empty(x.size(0), *[min(x.size(1), x.size(2))] * 2)
    p = torch.empty_like(gram)
    for a, b, c in steps:
        products.gram(smaller_first(x), out=gram)
        polynomial(products, gram, b, c, out=p)
        multiply(p, x, beta=a, out=following)
        x, following = following, x
    return x


def normalized(stack: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Each matrix of `stack` (count, rows, cols) over max(its Frobenius norm, eps), new memory in `dtype`."""
    # Norm and quotient in float32: float16 ends at 65,504, so gradients would overflow in it before they are divided,
    # and small ones vanish. bfloat16 has float32's range, and from it to it torch.optim.Muon rounds too; a wider factor
    # there would make the CPU hold all of X in float32.
    rounded = stack.dtype == dtype != torch.float16
    factor = dtype if rounded else torch.promote_types(stack.dtype, torch.float32)
    norm = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=None if rounded else factor)
    scale = norm.clamp_(min=eps).reciprocal_()[:, None, None]
    return torch.mul(stack, scale, out=torch.empty(stack.shape, dtype=dtype, device=stack.device))
