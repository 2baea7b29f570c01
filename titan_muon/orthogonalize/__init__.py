"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from __future__ import annotations

from torch import Tensor

from .coefficients import COEFFICIENTS, PRESCALED, coefficients, largest_value
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .newton_schulz import (
    Iteration,
    Products,
    frobenius_norms,
    gram,
    iterate,
    iteration,
    reference,
    standard,
    zero_nonfinite_,
)
from .sliced import TeamSlice, sliced, sliced_norms
from .symmetric import kernels_for, measured_choices, products_of

__all__ = [
    "COEFFICIENTS",
    "DTYPES",
    "PRESCALED",
    "Dispatch",
    "Iteration",
    "Kernel",
    "Method",
    "Products",
    "TeamSlice",
    "coefficients",
    "frobenius_norms",
    "gram",
    "iterate",
    "iteration",
    "kernels_for",
    "largest_value",
    "measured_choices",
    "orthogonalize",
    "products_of",
    "reference",
    "sliced_norms",
    "standard",
    "zero_nonfinite_",
]


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
    if of is None:
        return iterate(stack, iteration, method, products_of(method.products), norms, out)
    norms = sliced_norms(stack, of.team) if norms is None else norms
    steps, dtype = iteration.steps, DTYPES[method.dtype]
    return sliced(stack, steps, iteration.eps, dtype, method.runs(len(steps)), of, norms=norms, out=out)
