"""The Newton-Schulz iteration on the smaller Gram matrix, on stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import PLAIN, Products, multiply, polynomial, smaller_first
from .standard import almost_orthogonal_, delivered, following, normalized, start_norm


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

    The standard iteration multiplies X by polynomials in R = X Xᵀ, which commute: so it can be run on the small R, with
    Q the product of all polynomials, and X be multiplied by Q once, or before each step of `restarts` and at the end.
    Source: Zhang et al., "Gram Newton-Schulz" (2026). The result, `norms`, `out` and `prescale` are as in `standard`.
    """
    x = normalized(stack, eps, dtype, norms)
    return delivered(_iterated(x, following(x, out), steps, restarts, products, prescale), stack.dtype, out)


def _iterated(
    x: Tensor, other: Tensor, steps: Coefficients, restarts: Sequence[int], products: Products, prescale: bool
) -> Tensor:
    work = tuple(x.new_empty(x.size(0), *[min(x.size(1), x.size(2))] * 2) for _ in range(4))
    # R is advanced by itself and never compared with X: what rounding adds to its small eigenvalues grows with each
    # step, until R is no X Xᵀ any more. A restart makes it from X again, for the price of two products with X.
    starts = (0, *restarts, len(steps))
    for first, last in pairwise(starts):
        q = _accumulated(x, steps[first:last], work, products, prescale and first == 0)
        multiply(q, x, alpha=1 / start_norm(x.dtype) if last == len(steps) else 1.0, out=other)
        x, other = other, x
    return x


def _accumulated(x: Tensor, steps: Coefficients, work: Sequence[Tensor], products: Products, prescale: bool) -> Tensor:
    """The product of the steps' polynomials a I + b R + c R R, R advanced from X Xᵀ by each; it is one of `work`."""
    r, q, z, spare = work
    products.gram(smaller_first(x), out=r, alpha=start_norm(x.dtype) ** -2)
    if prescale:
        almost_orthogonal_(x, r)
    for index, (a, b, c) in enumerate(steps):
        if len(steps) == 1:
            polynomial(products, r, b, c, delta=a, out=q)
            break
        # Z without its a I, which enters below as `beta`, before a product is rounded: added to Z, a number around 4
        # would take the last digits of a diagonal that is nearly zero.
        polynomial(products, r, b, c, out=z)
        if index == 0:
            q.copy_(z).diagonal(dim1=1, dim2=2).add_(a)
        else:
            products.symmetric(q, z, q, alpha=1.0, beta=a, out=spare)
            q, spare = spare, q
        if index + 1 < len(steps):
            # R (Z + a I)² is the next X Xᵀ, since all of them commute.
            products.symmetric(r, z, r, alpha=1.0, beta=a, out=spare)
            products.symmetric(spare, z, spare, alpha=1.0, beta=a, out=r)
    return q
