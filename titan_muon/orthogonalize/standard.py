"""The standard Newton-Schulz iteration on stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import PLAIN, Products, multiply, polynomial, smaller_first


def standard(
    stack: Tensor,
    steps: Coefficients,
    eps: float,
    dtype: torch.dtype,
    products: Products = PLAIN,
    *,
    norms: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype.

    X <- a X + (b A + c A A) X with A = X Xᵀ, from X = matrix / max(norm, eps), on the smaller side, in `dtype`. Source:
    Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). The result is a new tensor or
    `out`, which may be `stack`. `norms`: `frobenius_norms(stack, dtype)`, if already computed.
    """
    x = normalized(stack, eps, dtype, norms)
    return delivered(_iterated(x, next_buffer(x, out), steps, products), stack.dtype, out)


def _iterated(x: Tensor, spare: Tensor, steps: Coefficients, products: Products) -> Tensor:
    # Two alternating buffers, because a product cannot overwrite its operand.
    gram = x.new_empty(x.size(0), *[min(x.size(1), x.size(2))] * 2)
    p = torch.empty_like(gram)
    for a, b, c in steps:
        products.gram(smaller_first(x), out=gram)
        polynomial(products, gram, b, c, out=p)
        multiply(p, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def next_buffer(x: Tensor, out: Tensor | None) -> Tensor:
    """Memory for the next X: `out` if the element size matches, else a new tensor."""
    # A third X for a large matrix would be most of the workspace.
    if out is not None and out.element_size() == x.element_size():
        return out.view(x.dtype)
    return torch.empty_like(x)


def delivered(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The result of an iteration, copied to `out` or cast to `dtype`."""
    if out is None:
        return x.to(dtype)
    # Copy even in place for different dtypes, because each element is read before its memory is overwritten.
    return out if x.data_ptr() == out.data_ptr() and x.dtype == out.dtype else out.copy_(x)


def frobenius_norms(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """The Frobenius norm of each matrix of `stack` (count, rows, cols), for an iteration in `dtype`."""
    # In float32, because gradients in float16 overflow above 65,504 and small gradients underflow. Between bfloat16
    # tensors the norm is bfloat16, as in torch.optim.Muon.
    rounded = stack.dtype == dtype != torch.float16
    wide = None if rounded else torch.promote_types(stack.dtype, torch.float32)
    return torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=wide)


def normalized(stack: Tensor, eps: float, dtype: torch.dtype, norms: Tensor | None = None) -> Tensor:
    """Each matrix of `stack` (count, rows, cols) divided by max(Frobenius norm, eps), a new tensor in `dtype`."""
    # The scale keeps the norms' dtype, because a wider scale would make the CPU compute all of X in float32.
    norms = frobenius_norms(stack, dtype) if norms is None else norms
    scale = norms.clamp(min=eps).reciprocal_()[:, None, None]
    return torch.mul(stack, scale, out=torch.empty(stack.shape, dtype=dtype, device=stack.device))
