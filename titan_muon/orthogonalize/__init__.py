"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from __future__ import annotations

from .coefficients import COEFFICIENTS, PRESCALED, coefficients, largest_value
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .newton_schulz import (
    Iteration,
    frobenius_norms,
    gram,
    iteration,
    orthogonalize,
    reference,
    standard,
    zero_nonfinite_,
)
from .sliced import TeamSlice, sliced_norms
from .symmetric import kernels_for, measured_choices, products_of

__all__ = [
    "COEFFICIENTS",
    "DTYPES",
    "PRESCALED",
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
    "products_of",
    "reference",
    "sliced_norms",
    "standard",
    "zero_nonfinite_",
]
