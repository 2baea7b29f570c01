"""Newton-Schulz iterations on stacks of matrices: torch.optim.Muon's arithmetic, the standard one, and Gram matrices.

`iterate` runs the iteration that a `Method` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from .coefficients import PRESCALED, Coefficients, coefficients
from .dispatch import DTYPES, Method


class Products(Protocol):
    """Symmetric products of an iteration. X is (count, m, n), all further matrices are (count, m, m)."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Fill `out` with alpha X Xᵀ."""

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I. A, B and C are symmetric, A and B commute."""


class PlainProducts:
    """Products of the device's matrix library."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        if alpha == 1:
            torch.bmm(x, x.mT, out=out)
        else:
            torch.baddbmm(out, x, x.mT, beta=0, alpha=alpha, out=out)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        # PyTorch copies C to `out` first: up to 2 % of the product on a CPU. C is a factor too, so not in place.
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
        if delta != 0:
            out.diagonal(dim1=1, dim2=2).add_(delta)


PLAIN = PlainProducts()


@dataclass(frozen=True)
class Iteration:
    """Name of the coefficients, (a, b, c) of each step, and the least norm."""

    name: str
    steps: Coefficients
    eps: float

    @property
    def prescaled(self) -> bool:
        """Whether `almost_orthogonal_` comes first."""
        return self.name in PRESCALED

    def __str__(self) -> str:
        return f"{self.name} x {len(self.steps)}, eps {self.eps:g}"


def iteration(choice: str | Sequence[Sequence[float]], steps: int, eps: float) -> Iteration:
    """A named set of coefficients or custom triples. Raises OptionError like `coefficients`."""
    rows = coefficients(choice, steps)
    return Iteration(choice if isinstance(choice, str) else str(rows), rows, eps)


def iterate(
    stack: Tensor,
    iteration: Iteration,
    method: Method,
    products: Products,
    norms: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack`, as `orthogonalize`. `products`: of the method."""
    steps, eps = iteration.steps, iteration.eps
    if method.algorithm == "reference":
        # Matrix by matrix, because a batched product may sum in a different order than torch.optim.Muon's.
        results = torch.empty(stack.shape, dtype=torch.bfloat16, device=stack.device) if out is None else out
        for matrix, result in zip(stack, results, strict=True):
            result.copy_(reference(matrix, steps, eps))
        return results
    dtype, prescale = DTYPES[method.dtype], iteration.name in PRESCALED
    if method.algorithm == "gram":
        return gram(stack, steps, eps, dtype, method.restarts, products, norms=norms, out=out, prescale=prescale)
    return standard(stack, steps, eps, dtype, products, norms=norms, out=out, prescale=prescale)


def zero_nonfinite_(stack: Tensor, norms: Tensor) -> Tensor:
    """Zero the matrices of `stack` (count, rows, cols) with a non-finite Frobenius norm in `norms`, in place.

    Returns a mask of the zeroed matrices, (count,) bool.
    """
    # By norm, because Newton-Schulz cannot normalize if the norm overflows (elements around 1e19).
    broken = norms.isfinite().logical_not_()
    if stack.device.type != "cpu" or broken.any():
        stack.masked_fill_(broken[:, None, None], 0)
        norms.masked_fill_(broken, 0)
    return broken


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
    result = _standard_steps(x, spare, steps, products, prescale)
    return delivered(result, stack.dtype, out, in_place=result is spare)


def _standard_steps(x: Tensor, spare: Tensor, steps: Coefficients, products: Products, prescale: bool) -> Tensor:
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
    result = _gram_steps(x, spare, steps, restarts, products, prescale)
    return delivered(result, stack.dtype, out, in_place=result is spare)


def _gram_steps(
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


def smaller_first(x: Tensor) -> Tensor:
    """A transposed view for tall matrices."""
    return x.mT if x.size(1) > x.size(2) else x


def wide_gram(x: Tensor) -> Tensor:
    """X Xᵀ in float32, for X (m, n) of any dtype."""
    if x.device.type == "cpu":
        # CPU products of 16-bit numbers do not accumulate in float32.
        wide = x.float()
        return wide @ wide.mT
    return torch.mm(x, x.mT, out_dtype=torch.float32)


def polynomial(products: Products, r: Tensor, b: float, c: float, *, delta: float = 0.0, out: Tensor) -> None:
    """Fill `out` with delta I + b R + c R R for symmetric R (count, m, m)."""
    if c != 0:
        products.symmetric(r, r, r, alpha=c, beta=b, delta=delta, out=out)
        return
    # PyTorch 2.13 ignores alpha = 0 of a product in float16 on CPUs.
    torch.mul(r, b, out=out)
    if delta != 0:
        out.diagonal(dim1=1, dim2=2).add_(delta)


def multiply(p: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor) -> None:
    """Fill `out` with alpha P X + beta X for each matrix on the smaller side; P (count, m, m) is symmetric."""
    # From the right for tall matrices, because on CPUs writing to transposed memory is a thousand times slower.
    left, right = (x, p) if x.size(1) > x.size(2) else (p, x)
    if beta == 0 and alpha == 1:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(x, left, right, alpha=alpha, beta=beta, out=out)
