"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .coefficients import COEFFICIENTS, PRESCALED, Coefficients, coefficients, largest_value
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .gram import gram
from .reference import reference
from .sliced import TeamSlice, sliced, sliced_norms
from .standard import frobenius_norms, standard
from .symmetric import kernels_for, measured_choices, products_of

__all__ = [
    "COEFFICIENTS",
    "DTYPES",
    "Dispatch",
    "Iteration",
    "Kernel",
    "Method",
    "TeamSlice",
    "coefficients",
    "frobenius_norms",
    "gram",
    "iteration",
    "kernels_for",
    "largest_value",
    "measured_choices",
    "orthogonalize",
    "reference",
    "sliced_norms",
    "standard",
    "zero_nonfinite_",
]


@dataclass(frozen=True)
class Iteration:
    """Name of the coefficients, (a, b, c) of each step, and the least norm."""

    name: str
    steps: Coefficients
    eps: float

    @property
    def prescaled(self) -> bool:
        return self.name in PRESCALED

    def __str__(self) -> str:
        return f"{self.name} x {len(self.steps)}, eps {self.eps:g}"


def iteration(choice: str | Sequence[Sequence[float]], steps: int, eps: float) -> Iteration:
    """A named set of coefficients or custom triples. Raises OptionError like `coefficients`."""
    rows = coefficients(choice, steps)
    return Iteration(choice if isinstance(choice, str) else str(rows), rows, eps)


def orthogonalize(
    stack: Tensor,
    iteration: Iteration,
    method: Method,
    norms: Tensor | None = None,
    out: Tensor | None = None,
    of: TeamSlice | None = None,
) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), which stays unchanged.

    Returns a new tensor of the stack's shape and dtype (bfloat16 for the reference), or `out`, which may be `stack`.
    `norms`: the stack's `frobenius_norms` for the method's dtype. `of`: the stack is a slice of a matrix, and `norms`
    are `sliced_norms`.
    """
    steps, eps = iteration.steps, iteration.eps
    if method.algorithm == "reference":
        # Matrix by matrix, because a batched product may sum in a different order than torch.optim.Muon's.
        results = torch.empty(stack.shape, dtype=torch.bfloat16, device=stack.device) if out is None else out
        for matrix, result in zip(stack, results, strict=True):
            result.copy_(reference(matrix, steps, eps))
        return results
    dtype, products = DTYPES[method.dtype], products_of(method.products)
    if of is not None:
        norms = sliced_norms(stack, of.team) if norms is None else norms
        return sliced(stack, steps, eps, dtype, method.runs(len(steps)), of, norms=norms, out=out)
    prescale = iteration.prescaled
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
