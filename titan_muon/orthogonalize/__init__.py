"""Newton-Schulz orthogonalization: tensors in, tensors out."""

from collections.abc import Callable, Mapping

from torch import Tensor

from .coefficients import COEFFICIENTS, Coefficients, coefficients
from .reference import reference

__all__ = ["ALGORITHMS", "COEFFICIENTS", "Algorithm", "Coefficients", "algorithm", "coefficients", "reference"]

Algorithm = Callable[[Tensor, Coefficients, float], Tensor]
"""(matrix (m, n), coefficients, eps) -> approximately orthogonal (m, n) in bfloat16, a new tensor."""

ALGORITHMS: Mapping[str, Algorithm] = {"reference": reference}
"""Algorithms by their names in a recipe."""


def algorithm(name: str) -> Algorithm:
    """The algorithm of a name. Raises ValueError naming the known ones if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"muon.orthogonalize = {name!r} is unknown; choose from: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
