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
    prescale: bool = False,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype.

    X <- a X + (b A + c A A) X with A = X Xᵀ, from X = matrix / max(norm, eps), on the smaller side, in `dtype`. Source
    as of `reference`. The result is a new tensor or `out`, which may be `stack`. `norms`: `frobenius_norms(stack,
    dtype)`. `prescale`: begin with `almost_orthogonal_`.
    """
    x = normalized(stack, eps, dtype, norms)
    spare = next_buffer(x, out)
    result = _iterated(x, spare, steps, products, prescale)
    return delivered(result, stack.dtype, out, in_place=result is spare)


def _iterated(x: Tensor, spare: Tensor, steps: Coefficients, products: Products, prescale: bool) -> Tensor:
    gram = x.new_empty(x.size(0), *[min(x.size(1), x.size(2))] * 2)
    p = torch.empty_like(gram)
    inverse = 1 / start_norm(x.dtype)
    for index, (a, b, c) in enumerate(steps):
        if prescale and index == 0:
            almost_orthogonal_(x, gram, products)
        else:
            products.gram(smaller_first(x), out=gram, alpha=inverse**2)
        polynomial(products, gram, b, c, out=p)
        scale = inverse if index + 1 == len(steps) else 1.0
        multiply(p, x, alpha=scale, beta=a * scale, out=spare)
        x, spare = spare, x
    return x


def almost_orthogonal_(x: Tensor, gram: Tensor, products: Products) -> None:
    """Scale X to S X in place, with S = diag(1 / sqrt(row sums of |X Xᵀ|)), and fill `gram` with the new X Xᵀ.

    The spectral norm of S X is at most 1, and closer to 1 than after a division by the Frobenius norm (Prach and
    Lampert, "Almost-Orthogonal Layers", 2022; Boissin et al., "Turbo-Muon", arXiv:2512.04632). S changes the polar
    factor if rows of X have unequal norms.
    """
    # With the scale of X, because float16 would round the squares of rows below 2^-12 of the norm to zero.
    products.gram(smaller_first(x), out=gram)
    wide = gram.to(torch.promote_types(gram.dtype, torch.float32))
    # Rows are scaled by at most 2^12 in float16.
    norm = start_norm(x.dtype)
    sums = wide.abs().sum(dim=-1).clamp_(min=norm**2 * 2.0**-24 if x.dtype == torch.float16 else 1e-20)
    scales = sums.rsqrt_().to(x.dtype)
    gram.mul_(scales[:, :, None]).mul_(scales[:, None, :])
    smaller_first(x).mul_(scales.mul_(norm)[:, :, None])


FLOAT16_NORM = 2.0**6
"""Norm of X in float16. Elements of a matrix of norm 1 would be subnormal, with fewer digits.

Singular values stay below LARGEST times this norm, so that no sum of products exceeds 2^16 - 2^5, float16's largest
number. cuBLAS may add the parts of a split product in float16, also where PyTorch's flag
`allow_fp16_reduced_precision_reduction` is off, because batched products ignore the flag.
"""


def start_norm(dtype: torch.dtype) -> float:
    """The Frobenius norm of the first X. The last product removes the scale."""
    return FLOAT16_NORM if dtype == torch.float16 else 1.0


def next_buffer(x: Tensor, out: Tensor | None) -> Tensor:
    """Memory for the next X: `out` if the element size matches, because a third X may be most of the workspace."""
    if out is not None and out.element_size() == x.element_size():
        return out.view(x.dtype)
    return torch.empty_like(x)


def delivered(x: Tensor, dtype: torch.dtype, out: Tensor | None, *, in_place: bool = False) -> Tensor:
    """The result, copied to `out` or cast to `dtype`. `in_place`: whether x is the `next_buffer`."""
    if out is None:
        return x.to(dtype)
    return out if in_place and x.dtype == out.dtype else out.copy_(x)


def frobenius_norms(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """The Frobenius norm of each matrix of `stack` (count, rows, cols), for an iteration in `dtype`."""
    # In float32, because float16 overflows above 65,504 and underflows. Between bfloat16 tensors the norm is bfloat16,
    # as in torch.optim.Muon.
    rounded = stack.dtype == dtype != torch.float16
    wide = None if rounded else torch.promote_types(stack.dtype, torch.float32)
    return torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=wide)


def normalized(stack: Tensor, eps: float, dtype: torch.dtype, norms: Tensor | None = None) -> Tensor:
    """Each matrix of `stack` (count, rows, cols) over max(norm, eps), times `start_norm`: a new tensor in `dtype`."""
    # In the norms' dtype, because a wider scale would make the CPU compute all of X in float32.
    norms = frobenius_norms(stack, dtype) if norms is None else norms
    scale = norms.clamp(min=eps).reciprocal_()[:, None, None]
    if dtype == torch.float16:
        scale.mul_(FLOAT16_NORM)
    return torch.mul(stack, scale, out=torch.empty(stack.shape, dtype=dtype, device=stack.device))
