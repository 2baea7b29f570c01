"""What orthogonalizing one matrix costs: FLOPs and memory of the algorithm that will run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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


def sliced_elements(rows: int, cols: int, slices: int) -> int:
    """Elements that one of `slices` ranks holds at once: its X and the next X; of m x m matrices three whole ones, and
    its rows of five."""
    m, n = min(rows, cols), max(rows, cols)
    return (2 * m * n + 5 * m * m) // slices + 3 * m * m


@dataclass(frozen=True)
class TeamCost:
    """What a slice of a matrix costs its owner besides Newton-Schulz: talking to the owners of the other slices.

    Attributes:
        sent: bytes to them for one matrix; it receives as many.
        calls: collectives for one matrix.
    """

    sent: int
    calls: int


def team_cost(side: int, slices: int, runs: Sequence[int], element_bytes: int) -> TeamCost:
    """What the owner of one of `slices` slices sends; `runs` are the steps between two restarts.

    For each run the Gram matrix, whose smaller `side` is whole in each slice, is summed in float32, each rank's rows of
    it at that rank, and gathered in the dtype of the iteration. So are the polynomial and the next Gram matrix of each
    step and the run's product of polynomials, unless the run is one step, which has one polynomial alone. And once the
    norm of each slice, 4 bytes.
    """
    gathers = sum(2 if length == 1 else 2 * length + 1 for length in runs)
    others = side * side // slices * (slices - 1)
    return TeamCost(others * (4 * len(runs) + element_bytes * gathers) + 4 * (slices - 1), len(runs) + gathers + 1)


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
        team: of a slice of a matrix what its owner exchanges with the owners of the others, None of a whole matrix.
    """

    method: str
    flops: int
    reason: str = ""
    batch: int = 1
    bytes: int = 0
    dtype: str = "bfloat16"
    team: TeamCost | None = None


class Passes(NamedTuple):
    """Element-wise passes of the foreach calls over memory, for one element of a stored piece.

    Attributes:
        momentum: bytes that advancing the momentum and packing read and write.
        momentum_launches: operators of a call.
        apply: bytes that decay and update read and write.
        apply_launches: operators of a call.
    """

    momentum: float
    momentum_launches: int
    apply: float
    apply_launches: int


NORMALIZING_BYTES = 10
"""For an element of a whole matrix: its norm (2), its quotient in float16 (2 + 2), and the result from there (2 + 2)."""


def passes(element: int, state: int, wire: int, *, stochastic: bool, cautious: bool) -> Passes:
    """The passes over parameters, momentum and buffers whose elements have so many bytes.

    `stochastic` and `cautious` are rounding and weight decay. Counted from the operators of `step/update.py` and
    `step/rounding.py`, as if no cache kept anything; tests/unit/plan/test_passes.py counts again.
    """
    # Momentum: lerp in the wider dtype, lerp once more for Nesterov, and packing.
    wide = max(element, state)
    momentum, launches = 3 * wide + 3 * wide + wide + wire, 3
    if element < wide:
        momentum, launches = momentum + element + wide, launches + 1
    if state < wide:
        momentum, launches = momentum + 2 * (state + wide), launches + 2
    if stochastic:
        # Weights and updates in float32, a hash for each element, and the way back.
        return Passes(momentum, launches, 120 + wire + 60 * cautious, 16 + 6 * cautious)
    # Apply: decay, updates in the dtype of wider weights, and the sum.
    apply, apply_launches = (6 * element + wire, 3) if wire < element else (4 * element + wire, 2)
    if cautious:
        apply, apply_launches = apply + 14 * element + wire, apply_launches + 6
    return Passes(momentum, launches, apply, apply_launches)


FLOAT32_PASSES = passes(4, 4, 2, stochastic=False, cautious=False)
"""Of float32 parameters and momentum, whose matrices travel in bfloat16."""


class WorkOf(Protocol):
    """How rows x cols matrices of parameter number `parameter` are orthogonalized, or one of so many slices of them."""

    def __call__(self, parameter: int, rows: int, cols: int, slices: int = 1, /) -> Work: ...
