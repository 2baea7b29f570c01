"""The Newton-Schulz iteration on the smaller Gram matrix, on stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import PLAIN, Products, multiply, polynomial, smaller_first
from .standard import almost_orthogonal_, delivered, next_buffer, normalized, start_norm


def gram(
    stack: Tensor,
    steps: Coefficients,
    eps: float,
    dtype: torch.dtype,
    restarts: Sequence[int] = (),
    products: Products = PLAIN,
    *,
    norms: Tensor | None = None,
    out: Tensor | None = None,
    prescale: bool = False,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype.

    The standard iteration multiplies X by polynomials in R = X Xᵀ, which commute. So iterate on the small R, accumulate
    the product Q of all polynomials, and multiply X by Q before each step of `restarts` and at the end.
    Source: Zhang et al., "Gram Newton-Schulz" (2026). Result, `norms`, `out` and `prescale` as in `standard`.
    """
    x = normalized(stack, eps, dtype, norms)
    spare = next_buffer(x, out)
    result = _iterated(x, spare, steps, restarts, products, prescale)
    return delivered(result, stack.dtype, out, in_place=result is spare)


def _iterated(
    x: Tensor, spare: Tensor, steps: Coefficients, restarts: Sequence[int], products: Products, prescale: bool
) -> Tensor:
    work = tuple(x.new_empty(x.size(0), *[min(x.size(1), x.size(2))] * 2) for _ in range(4))
    # Rounding errors in small eigenvalues of R grow with each step. A restart recomputes R from X.
    starts = (0, *restarts, len(steps))
    for first, last in pairwise(starts):
        q = _accumulated(x, steps[first:last], work, products, prescale and first == 0)
        multiply(q, x, alpha=1 / start_norm(x.dtype) if last == len(steps) else 1.0, out=spare)
        x, spare = spare, x
    return x


def _accumulated(x: Tensor, steps: Coefficients, work: Sequence[Tensor], products: Products, prescale: bool) -> Tensor:
    """The product of the steps' polynomials a I + b R + c R R, in one of `work`."""
    r, q, z, spare = work
    if prescale:
        almost_orthogonal_(x, r, products)
    else:
        products.gram(smaller_first(x), out=r, alpha=start_norm(x.dtype) ** -2)
    for index, (a, b, c) in enumerate(steps):
        if len(steps) == 1:
            polynomial(products, r, b, c, delta=a, out=q)
            break
        # Z omits a I, added below as `beta`, because adding a (about 4) would lose the last digits of a small diagonal.
        polynomial(products, r, b, c, out=z)
        if index == 0:
            q.copy_(z).diagonal(dim1=1, dim2=2).add_(a)
        else:
            products.symmetric(q, z, q, alpha=1.0, beta=a, out=spare)
            q, spare = spare, q
        if index + 1 < len(steps):
            # R (Z + a I)² is the next X Xᵀ, because all factors commute.
            products.symmetric(r, z, r, alpha=1.0, beta=a, out=spare)
            products.symmetric(spare, z, spare, alpha=1.0, beta=a, out=r)
    return q
