"""What orthogonalizing one matrix costs: FLOPs and memory of the algorithm that will run."""

from __future__ import annotations

from dataclasses import dataclass


def standard_flops(rows: int, cols: int, steps: int, cubic: int = 0) -> int:
    """FLOPs of the standard iteration on a rows x cols matrix.

    With m <= n the two sides, each step multiplies X Xᵀ (2 m² n), A A (2 m³) and B X (2 m² n). The `cubic` ones among
    the steps, whose coefficient c is 0, do without A A.
    """
    m, n = min(rows, cols), max(rows, cols)
    return steps * 4 * m * m * n + (steps - cubic) * 2 * m**3


def gram_flops(rows: int, cols: int, steps: int, restarts: int, cubic: int = 0) -> int:
    """FLOPs of the iteration on the smaller Gram matrix R = X Xᵀ of a rows x cols matrix, with that many restarts.

    With m <= n the two sides, R and Q X are 2 m² n each and made once more after each restart. A step has four m³
    products, of which the first of a run needs no Q Z, the last of a run no new R (two), and a `cubic` one no R R.
    """
    m, n = min(rows, cols), max(rows, cols)
    runs = restarts + 1
    return runs * 4 * m * m * n + (4 * steps - 3 * runs - cubic) * 2 * m**3


def standard_elements(rows: int, cols: int) -> int:
    """Elements that the standard iteration holds at once: X, the next X, X Xᵀ and the polynomial in it."""
    m, n = min(rows, cols), max(rows, cols)
    return 2 * m * n + 2 * m * m


def gram_elements(rows: int, cols: int) -> int:
    """Elements that the Gram iteration holds at once: X, the next X, and R, Q, the polynomial in R and the next R."""
    m, n = min(rows, cols), max(rows, cols)
    return 2 * m * n + 4 * m * m


@dataclass(frozen=True)
class Work:
    """How a matrix is orthogonalized, and what that costs.

    Attributes:
        method: algorithm with all that it depends on; matrices of one shape and method may be orthogonalized together.
        flops: FLOPs of one matrix.
        reason: why an automatic choice fell on it; empty if nothing was chosen.
        batch: most matrices that are orthogonalized together.
        bytes: working memory for each of them.
        dtype: dtype of its products.
    """

    method: str
    flops: int
    reason: str = ""
    batch: int = 1
    bytes: int = 0
    dtype: str = "bfloat16"
