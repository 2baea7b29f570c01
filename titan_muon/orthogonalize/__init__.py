"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import orthogonality_error, relative_error, silence, singular_band
from .coefficients import COEFFICIENTS, Coefficients, coefficients
from .dispatch import ALGORITHMS, DTYPES, Dispatch, Kernel, Method
from .gram import gram
from .reference import reference
from .standard import standard
from .symmetric import KERNEL_CHOICES, kernels_for, products_of

__all__ = [
    "ALGORITHMS",
    "COEFFICIENTS",
    "DTYPES",
    "KERNEL_CHOICES",
    "Coefficients",
    "Dispatch",
    "Iteration",
    "Kernel",
    "Method",
    "coefficients",
    "gram",
    "iteration",
    "kernels_for",
    "orthogonality_error",
    "orthogonalize",
    "reference",
    "relative_error",
    "silence",
    "singular_band",
    "standard",
]


@dataclass(frozen=True)
class Iteration:
    """What is computed.

    Attributes:
        name: of the coefficients, or they themselves.
        steps: (a, b, c) of each step.
        eps: smallest Frobenius norm that a matrix is divided by.
    """

    name: str
    steps: Coefficients
    eps: float

    def __str__(self) -> str:
        return f"{self.name} x {len(self.steps)}, eps {self.eps:g}"


def iteration(choice: str | Sequence[Sequence[float]], steps: int, eps: float) -> Iteration:
    """The iteration of a set of coefficients, or of own triples. Raises ValueError as `coefficients` does."""
    rows = coefficients(choice, steps)
    return Iteration(choice if isinstance(choice, str) else str(rows), rows, eps)


def orthogonalize(stack: Tensor, iteration: Iteration, method: Method) -> Tensor:
    """Approximately U Vᵀ of each matrix U S Vᵀ of `stack` (count, rows, cols), which is left as it is.

    The result is new memory of that shape: in the dtype of `stack`, but bfloat16 from the reference.
    """
    steps, eps = iteration.steps, iteration.eps
    if method.algorithm == "reference":
        results = [reference(matrix, steps, eps) for matrix in stack]
        return results[0][None] if len(results) == 1 else torch.stack(results)
    dtype, products = DTYPES[method.dtype], products_of(method.products)
    if method.algorithm == "gram":
        return gram(stack, steps, eps, dtype, method.restarts, products)
    return standard(stack, steps, eps, dtype, products)
