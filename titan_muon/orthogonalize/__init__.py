"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .coefficients import COEFFICIENTS, PRESCALED, Coefficients, coefficients
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .gram import gram
from .reference import reference
from .sliced import Slice, Team, sliced, sliced_norms
from .standard import frobenius_norms, standard
from .symmetric import kernels_for, products_of

__all__ = [
    "COEFFICIENTS",
    "DTYPES",
    "Coefficients",
    "Dispatch",
    "Iteration",
    "Kernel",
    "Method",
    "Slice",
    "Team",
    "coefficients",
    "frobenius_norms",
    "gram",
    "iteration",
    "kernels_for",
    "orthogonalize",
    "reference",
    "sliced_norms",
    "standard",
    "zero_nonfinite_",
]


@dataclass(frozen=True)
class Iteration:
    """What is computed: coefficients, by their name, as (a, b, c) of each step, and the least norm to divide by."""

    name: str
    steps: Coefficients
    eps: float

    @property
    def prescaled(self) -> bool:
        """Whether the iteration begins with the scaling of `standard.almost_orthogonal_`."""
        return self.name in PRESCALED

    def __str__(self) -> str:
        return f"{self.name} x {len(self.steps)}, eps {self.eps:g}"


def iteration(choice: str | Sequence[Sequence[float]], steps: int, eps: float) -> Iteration:
    """The iteration of a set of coefficients, or of own triples. Raises OptionError as `coefficients` does."""
    rows = coefficients(choice, steps)
    return Iteration(choice if isinstance(choice, str) else str(rows), rows, eps)


def orthogonalize(
    stack: Tensor,
    iteration: Iteration,
    method: Method,
    norms: Tensor | None = None,
    out: Tensor | None = None,
    of: Slice | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), which is left as it is.

    The result is new memory of that shape, in the dtype of `stack`, but bfloat16 from the reference; or it is written
    to `out`, which may be `stack`. `norms` are the stack's `frobenius_norms` for the method's dtype, if they are there.
    `of`: a stack of one slice of a matrix, of which the team has the others; `norms` are then `sliced_norms`.
    """
    steps, eps = iteration.steps, iteration.eps
    if method.algorithm == "reference":
        # One by one: a batched product may add in another order than torch.optim.Muon's.
        found = torch.empty(stack.shape, dtype=torch.bfloat16, device=stack.device) if out is None else out
        for matrix, result in zip(stack, found, strict=True):
            result.copy_(reference(matrix, steps, eps))
        return found
    dtype, products = DTYPES[method.dtype], products_of(method.products)
    if of is not None:
        norms = sliced_norms(stack, of.team) if norms is None else norms
        return sliced(stack, steps, eps, dtype, method.runs(len(steps)), of, norms=norms, out=out)
    prescale = iteration.prescaled
    if method.algorithm == "gram":
        return gram(stack, steps, eps, dtype, method.restarts, products, norms=norms, out=out, prescale=prescale)
    return standard(stack, steps, eps, dtype, products, norms=norms, out=out, prescale=prescale)


def zero_nonfinite_(stack: Tensor, norms: Tensor) -> Tensor:
    """Set each matrix of `stack` (count, rows, cols) whose Frobenius norm, of `norms`, is not finite to zero, in place.

    Returns which they are, (count,) bool on the stack's device; the host does not wait for a GPU.
    """
    # By the norm and not by elements: of elements around 1e19 it overflows, and Newton-Schulz could not normalize them
    # either.
    broken = norms.isfinite().logical_not_()
    # To ask a GPU whether there are any would be to wait for it.
    if stack.device.type != "cpu" or broken.any():
        stack.masked_fill_(broken[:, None, None], 0)
        norms.masked_fill_(broken, 0)
    return broken
