"""Coefficients of the quintic Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X Xᵀ, with their sources."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

Coefficients = tuple[tuple[float, float, float], ...]
"""(a, b, c) of each step."""

COEFFICIENTS: Mapping[str, Coefficients] = {
    # Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); torch.optim.Muon's default.
    "keller_jordan": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng's five-step schedule (2025), as used in Emerging-Optimizers and dion.
    "you_jiacheng": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Sets by name. A set of one step is repeated; of a longer one exactly that many steps may be asked for."""


def coefficients(choice: str | Sequence[Sequence[float]], steps: int) -> Coefficients:
    """(a, b, c) for each of `steps` steps, from the name of a set or a list of that many triples.

    Raises ValueError for an unknown name, a wrong number of steps, or a triple that is not three finite numbers.
    """
    if steps < 1:
        raise ValueError(f"ns_steps = {steps} must be at least 1")
    if isinstance(choice, str):
        if choice not in COEFFICIENTS:
            near = difflib.get_close_matches(choice, COEFFICIENTS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"ns_coefficients = {choice!r} is not one of {', '.join(COEFFICIENTS)}{hint}")
        table = COEFFICIENTS[choice]
        rows = table * steps if len(table) == 1 else table
    else:
        rows = tuple(_triple(row) for row in choice)
    if len(rows) != steps:
        raise ValueError(f"ns_coefficients has {len(rows)} steps but ns_steps = {steps}; make them equal")
    return rows


def _triple(row: object) -> tuple[float, float, float]:
    numbers = tuple(row) if isinstance(row, Sequence) and not isinstance(row, str) else ()
    if len(numbers) != 3 or not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        raise ValueError(f"ns_coefficients: {row!r} is not three finite numbers (a, b, c)")
    a, b, c = numbers
    return float(a), float(b), float(c)
