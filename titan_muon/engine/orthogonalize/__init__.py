"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from .coefficients import COEFFICIENTS, Iteration, coefficients, iteration, largest_value
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .newton_schulz import (
    NO_UPDATE,
    frobenius_norms,
    iterate,
    iteration_calls,
    orthogonalize,
    prepared,
    products_for,
    start_norm,
    zero_nonfinite_,
)

__all__ = [
    "COEFFICIENTS",
    "DTYPES",
    "NO_UPDATE",
    "Dispatch",
    "Iteration",
    "Kernel",
    "Method",
    "coefficients",
    "frobenius_norms",
    "iterate",
    "iteration",
    "iteration_calls",
    "largest_value",
    "orthogonalize",
    "prepared",
    "products_for",
    "start_norm",
    "zero_nonfinite_",
]
