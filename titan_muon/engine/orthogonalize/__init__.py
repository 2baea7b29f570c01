"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from .coefficients import COEFFICIENTS, Iteration, coefficients, iteration, largest_value
from .dispatch import DTYPES, Dispatch, Kernel, Method
from .newton_schulz import (
    NO_UPDATE,
    frobenius_norms,
    iterate,
    iterate_normalized,
    orthogonalize,
    prepared,
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
    "iterate_normalized",
    "iteration",
    "largest_value",
    "orthogonalize",
    "prepared",
    "start_norm",
    "zero_nonfinite_",
]
