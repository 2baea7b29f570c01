"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from .coefficients import COEFFICIENTS, Coefficients, coefficients
from .reference import reference

__all__ = ["COEFFICIENTS", "Coefficients", "coefficients", "reference"]
