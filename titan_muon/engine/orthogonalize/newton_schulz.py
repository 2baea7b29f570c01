"""Newton-Schulz iterations on stacks of matrices: torch.optim.Muon's, the standard one, of Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..layout.work import gram_elements, gram_flops, standard_elements
from .coefficients import Coefficients, Iteration

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
NO_UPDATE = -1.0
"""In the place of the norm of a matrix that gets no update."""


Call = Callable[[], object]
"""Operators or a kernel on fixed tensors."""


class Product(Protocol):
    """The call that fills `out` with alpha A B, or with alpha A B + beta C. A is (count, m, k).

    A product may compute only symmetric results. The call may run again, with other numbers in the tensors.
    """

    def __call__(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor
    ) -> Call: ...


@dataclass(frozen=True)
class Method:
    """An algorithm with all parameters except the coefficients.

    Attributes:
        algorithm: `standard`, `gram` or `reference`.
        dtype: of the iteration, a name in DTYPES.
        restarts: the Gram iteration restarts before these steps.
        products, product: of symmetric results, by name and as a function, for `fewest` matrices or more; else the
            device's.
        reason: of the choice by `auto`, else empty.
    """

    algorithm: str
    dtype: str
    restarts: tuple[int, ...] = ()
    products: str = "plain"
    fewest: int = 1
    batch: int = 1
    reason: str = field(default="", compare=False)
    product: Product | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        restarts = f" restart {','.join(map(str, self.restarts))}" if self.restarts else ""
        fewest = f" from {self.fewest} matrices" if self.fewest > 1 else ""
        products = "" if self.products == "plain" else f" {self.products}{fewest}"
        return f"{self.algorithm} {self.dtype}{restarts}{products}"

    def flops(self, rows: int, cols: int, steps: Coefficients) -> int:
        """FLOPs for a matrix, with symmetric products counted in full."""
        # The reference computes all three products even for c = 0.
        cubic = sum(c == 0 for _, _, c in steps) if self.algorithm != "reference" else 0
        return gram_flops(rows, cols, len(steps), len(self.runs(len(steps))) - 1, cubic)

    def runs(self, steps: int) -> tuple[int, ...]:
        """Steps between restarts; all but the Gram iteration restart in each step."""
        restarts = self.restarts if self.algorithm == "gram" else range(1, steps)
        return tuple(last - first for first, last in pairwise((0, *restarts, steps)))

    def operators(self, steps: int) -> int:
        """Operators of PyTorch for a batch, with the norms and the normalization."""
        runs = sum(3 if length == 1 else 4 * length + 1 for length in self.runs(steps))
        return runs + (5 if self.dtype == "float16" else 4)

    def work_bytes(self, rows: int, cols: int, device: str, out_bytes: int = 0) -> int:
        """Working bytes of a matrix, without the input and the kernels' scratch memory.

        `out_bytes`: bytes per element of an output in place, which serves as an X buffer.
        """
        elements = gram_elements if self.algorithm == "gram" else standard_elements
        itemsize = DTYPES[self.dtype].itemsize
        spared = rows * cols if self.algorithm != "reference" and out_bytes == itemsize else 0
        iteration = (elements(rows, cols) - spared) * itemsize
        if device != "cpu":
            return iteration
        # Normalization to float16 with two float32 copies, and from float32 to bfloat16 with a single copy.
        return max(iteration, rows * cols * (10 if self.dtype == "float16" else 6 if out_bytes > itemsize else 0))


class Methods(Protocol):
    """The methods of a device for the matrices of a step. `device`: type of the device."""

    @property
    def device(self) -> str: ...

    def choose(self, rows: int, cols: int, steps: Coefficients) -> Method:
        """The method for a matrix. Raises OptionError if none is safe for the coefficients."""


def plain(a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor) -> Call:
    """The product of the device's matrix library."""
    if c is None and alpha == 1:
        return partial(torch.bmm, a, b, out=out)
    # PyTorch copies C to `out` first: up to 2 % of the product on a CPU. C is a factor too, so not in place.
    return partial(torch.baddbmm, out if c is None else c, a, b, beta=beta, alpha=alpha, out=out)


def orthogonalize(
    stack: Tensor,
    iteration: Iteration,
    method: Method,
    norms: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), which stays unchanged.

    Returns a new tensor of the stack's shape and dtype (bfloat16 for the reference), or `out`, which may be `stack`.
    `norms`: the stack's `frobenius_norms` for the method's dtype.
    """
    return prepared(iteration, method, len(stack))(stack, norms=norms, out=out)


def prepared(iteration: Iteration, method: Method, count: int) -> Callable[..., Tensor]:
    """`orthogonalize(stack, iteration, method, norms=..., out=...)` for `count` matrices."""
    steps, eps = iteration.steps, iteration.eps
    if method.algorithm == "reference":
        return partial(_references, steps=steps, eps=eps)
    dtype, runs, product = DTYPES[method.dtype], method.runs(len(steps)), products_for(method, count)
    return partial(iterate, steps=steps, eps=eps, dtype=dtype, runs=runs, product=product)


def products_for(method: Method, count: int) -> Product:
    """The symmetric products of `count` matrices."""
    return method.product if method.product is not None and count >= method.fewest else plain


def zero_nonfinite_(stack: Tensor, norms: Tensor, broken: Tensor) -> None:
    """Zero the matrices of `stack` (count, rows, cols) with a non-finite Frobenius norm in `norms`, in place.

    Fills `broken` (count,) bool with a mask of the zeroed matrices, whose norms become NO_UPDATE.
    """
    # By norm, because Newton-Schulz cannot normalize if the norm overflows (elements around 1e19). The comparison is
    # false for NaN, and takes one launch instead of the four of `isfinite`.
    torch.lt(norms, math.inf, out=broken).logical_not_()
    if stack.device.type != "cpu" or broken.any():
        stack.masked_fill_(broken[:, None, None], 0)
        norms.masked_fill_(broken, NO_UPDATE)


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


def _references(
    stack: Tensor, steps: Coefficients, eps: float, *, norms: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    # Matrix by matrix, because a batched product may sum in a different order than torch.optim.Muon's.
    results = torch.empty(stack.shape, dtype=torch.bfloat16, device=stack.device) if out is None else out
    for matrix, result in zip(stack, results, strict=True):
        result.copy_(reference(matrix, steps, eps))
    return results


def iterate(
    stack: Tensor,
    steps: Coefficients,
    eps: float,
    dtype: torch.dtype,
    runs: Sequence[int] = (),
    product: Product = plain,
    *,
    norms: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), in its shape and dtype.

    X <- a X + (b R + c R R) X with R = X Xᵀ, from X = matrix / max(norm, eps), on the smaller side, in `dtype`. Source
    as of `reference`. `runs`: numbers of steps with a single R, by default one each (the standard iteration). Longer
    runs are the Gram iteration: the steps multiply X by polynomials in R, which commute. So a run iterates on the small
    R, accumulates the product Q of all polynomials, and multiplies X by Q. Source: Zhang et al., "Gram Newton-Schulz"
    (2026). Rounding errors in small eigenvalues of R grow with each step, and the next run computes R from X.

    The result is a new tensor or `out`, which may be `stack`. `norms`: `frobenius_norms(stack, dtype)`.
    """
    x = normalized(stack, eps, dtype, norms)
    # `out` if the element size matches, because a third X may be most of the workspace.
    buffer = out.view(x.dtype) if out is not None and out.element_size() == x.element_size() else torch.empty_like(x)
    runs = runs or (1,) * len(steps)
    side = min(x.size(1), x.size(2))
    squares = [x.new_empty(x.size(0), side, side) for _ in range(2 if max(runs) == 1 else 4)]
    for call in iteration_calls(x, buffer, squares, steps, runs, product):
        call()
    x = x if len(runs) % 2 == 0 else buffer
    if out is None:
        return x.to(stack.dtype)
    return out if x is buffer and x.dtype == out.dtype else out.copy_(x)


def iteration_calls(
    x: Tensor,
    spare: Tensor,
    squares: Sequence[Tensor],
    steps: Coefficients,
    runs: Sequence[int],
    product: Product = plain,
) -> Iterator[Call]:
    """The calls of `iterate` on `normalized` matrices. The result is in `x` after an even number of runs, or `spare`.

    `squares`: memory of R and Q, and in longer runs of Z and the next R.
    """
    norm, tall = start_norm(x.dtype), x.size(1) > x.size(2)
    for first, last in pairwise(accumulate(runs, initial=0)):
        wide = x.mT if tall else x
        yield product(wide, wide.mT, alpha=norm**-2, out=squares[0])
        beta, q = yield from _polynomial(steps[first:last], squares, product)
        scale = 1 / norm if last == len(steps) else 1.0
        # From the right for tall matrices, because on CPUs writing to transposed memory is a thousand times slower.
        left, right = (x, q) if tall else (q, x)
        yield plain(left, right, None if beta == 0 else x, alpha=scale, beta=beta * scale, out=spare)
        x, spare = spare, x


def _polynomial(
    steps: Coefficients, squares: Sequence[Tensor], product: Product
) -> Generator[Call, None, tuple[float, Tensor]]:
    """Returns (beta, Q) of steps X <- Q X + beta X, from R, the first of `squares`, which all are overwritten."""
    r, q, *rest = squares
    if len(steps) == 1:
        a, b, c = steps[0]
        yield _quadratic(product, r, b, c, out=q)
        return a, q
    z, spare = rest
    for index, (a, b, c) in enumerate(steps):
        # Z omits a I, added below as `beta`, because adding a (about 4) would lose the last digits of a small diagonal.
        yield _quadratic(product, r, b, c, out=z)
        if index == 0:
            yield partial(q.copy_, z)
            yield partial(q.diagonal(dim1=1, dim2=2).add_, a)
        else:
            yield product(q, z, q, beta=a, out=spare)
            q, spare = spare, q
        if index + 1 < len(steps):
            # R (Z + a I)² is the next X Xᵀ, because all factors commute.
            yield product(r, z, r, beta=a, out=spare)
            yield product(spare, z, spare, beta=a, out=r)
    return 0.0, q


def _quadratic(product: Product, r: Tensor, b: float, c: float, *, out: Tensor) -> Call:
    """Fill `out` with b R + c R R for symmetric R (count, m, m)."""
    # PyTorch 2.13 ignores alpha = 0 of a product in float16 on CPUs.
    return product(r, r, r, alpha=c, beta=b, out=out) if c != 0 else partial(torch.mul, r, b, out=out)


FLOAT16_NORM = 2.0**6
"""Norm of X in float16. Elements of a matrix of norm 1 would be subnormal, with fewer digits.

Singular values stay below 4 times this norm, so that no sum of products exceeds 2^16 - 2^5, float16's largest
number. cuBLAS may add the parts of a split product in float16, also where PyTorch's flag
`allow_fp16_reduced_precision_reduction` is off, because batched products ignore the flag.
"""


def start_norm(dtype: torch.dtype) -> float:
    """The Frobenius norm of the first X. The last product removes the scale."""
    return FLOAT16_NORM if dtype == torch.float16 else 1.0


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
