"""The cost of orthogonalizing a matrix: FLOPs and working memory of each algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


def standard_flops(rows: int, cols: int, steps: int, cubic: int = 0) -> int:
    """FLOPs of the standard iteration on a rows x cols matrix.

    For sides m <= n each step multiplies X Xᵀ (2 m² n), A A (2 m³) and B X (2 m² n). The `cubic` steps, with
    coefficient c = 0, skip A A.
    """
    m, n = min(rows, cols), max(rows, cols)
    return steps * 4 * m * m * n + (steps - cubic) * 2 * m**3


def gram_flops(rows: int, cols: int, steps: int, restarts: int, cubic: int = 0) -> int:
    """FLOPs of the iteration on the smaller Gram matrix R = X Xᵀ of a rows x cols matrix.

    For sides m <= n, R and Q X cost 2 m² n each, once per run (`restarts` + 1). A step has four m³ products. The first
    step of a run skips Q Z, the last step skips the next R (two products), and a `cubic` step skips R R.
    """
    m, n = min(rows, cols), max(rows, cols)
    runs = restarts + 1
    return runs * 4 * m * m * n + (4 * steps - 3 * runs - cubic) * 2 * m**3


def standard_elements(rows: int, cols: int) -> int:
    """Elements of the standard iteration: X, the next X, X Xᵀ and the polynomial."""
    m, n = min(rows, cols), max(rows, cols)
    return 2 * m * n + 2 * m * m


def gram_elements(rows: int, cols: int) -> int:
    """Elements of the Gram iteration: X, the next X, R, Q, the polynomial in R and the next R."""
    m, n = min(rows, cols), max(rows, cols)
    return 2 * m * n + 4 * m * m


def sliced_elements(rows: int, cols: int, slices: int) -> int:
    """Elements on a rank: slices of X and the next X, three whole m x m matrices, rows of five."""
    m, n = min(rows, cols), max(rows, cols)
    return (2 * m * n + 5 * m * m) // slices + 3 * m * m


@dataclass(frozen=True)
class TeamCost:
    """Traffic of a matrix between slice owners: bytes `sent` (and received), and `calls`."""

    sent: int
    calls: int


def team_cost(side: int, slices: int, runs: Sequence[int], element_bytes: int) -> TeamCost:
    """Traffic of an owner with one of `slices` slices; `runs` are the steps between restarts.

    For each run the Gram matrix (`side` x `side`) is reduce-scattered in float32 by rows and all-gathered in the dtype
    of the iteration, like each step's polynomial and next Gram matrix, and the run's product of polynomials (a run of a
    single step has only the polynomial). The norm of each slice (4 bytes) is exchanged once.
    """
    gathers = sum(2 if length == 1 else 2 * length + 1 for length in runs)
    peers_elements = side * side // slices * (slices - 1)
    sent = peers_elements * (4 * len(runs) + element_bytes * gathers) + 4 * (slices - 1)
    return TeamCost(sent, len(runs) + gathers + 1)


@dataclass(frozen=True)
class Work:
    """The method of orthogonalizing a matrix, and the cost.

    Attributes:
        method: algorithm and parameters; a batch has matrices of equal shape and method.
        reason: of an automatic choice, else empty.
        batch: most matrices of a batch.
        bytes: working memory per matrix.
        dtype: of the products.
        team: traffic between the owners of the slices; None if the matrix is not sliced.
    """

    method: str
    flops: int
    reason: str = ""
    batch: int = 1
    bytes: int = 0
    dtype: str = "bfloat16"
    team: TeamCost | None = None


class Traffic(NamedTuple):
    """Bytes read and written for an element of a stored piece, and operators of a call.

    `advance`: advance the momentum and pack. `apply`: decay and update.
    """

    advance: int
    advance_launches: int
    apply: int
    apply_launches: int


NORMALIZING_BYTES = 10
"""Bytes for an element of a whole matrix: norm (2), quotient in float16 (2 + 2), result in bfloat16 (2 + 2)."""


def traffic(element: int, state: int, wire: int, *, stochastic: bool, cautious: bool, fused: bool = False) -> Traffic:
    """Traffic for elements of weights, momentum and buffers with these sizes in bytes.

    Counts the operators of `step/update.py` and `step/rounding.py`, without caches; tests/unit/plan/test_passes.py
    compares. `stochastic`: rounding of bfloat16 weights. `cautious`: weight decay.
    `fused`: kernels of `algorithms/fused_kernels.py`.
    """
    if fused:
        # Each tensor once, and the norm of the update.
        return Traffic(2 * state + element + wire, 1, 2 * element + 2 * wire, 2)
    # lerp in the wider dtype, another for Nesterov, and packing.
    wide = max(element, state)
    advance, launches = 7 * wide + wire, 3
    if element < wide:
        advance, launches = advance + element + wide, launches + 1
    if state < wide:
        advance, launches = advance + 2 * (state + wide), launches + 2
    if stochastic:
        # The norm of the update. Weights and updates in float32, a hash of each element, and the way back.
        return Traffic(advance, launches, 120 + 2 * wire + 60 * cautious, 17 + 6 * cautious)
    # The norm of the update, decay, updates in the dtype of wider weights, and the sum.
    apply, apply_launches = (6 * element + 2 * wire, 4) if wire < element else (4 * element + 2 * wire, 3)
    if cautious:
        apply, apply_launches = apply + 14 * element + wire, apply_launches + 6
    return Traffic(advance, launches, apply, apply_launches)


FLOAT32_TRAFFIC = traffic(4, 4, 2, stochastic=False, cautious=False)


@dataclass(frozen=True)
class ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Default: float32 weights and momentum.

    `advance` calls change the momentum and `apply` calls the weights: at most so many `elements`, or one row, each with
    so many temporary `bytes`. `finish_bytes`: of the rule, for an element of a whole matrix.
    """

    advance_elements: int = 2**23
    advance_bytes: int = 4
    apply_elements: int = 2**23
    apply_bytes: int = 4
    finish_bytes: int = 0
    traffic: Traffic = FLOAT32_TRAFFIC


FLOAT32_COST = ElementwiseCost()


class WorkOf(Protocol):
    """The work of a matrix of parameter number `parameter`, or of a slice."""

    def __call__(self, parameter: int, rows: int, cols: int, slices: int = 1, /) -> Work: ...
