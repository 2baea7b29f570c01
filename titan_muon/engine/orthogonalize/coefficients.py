"""Coefficients of the quintic Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X Xᵀ."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_muon.options import OptionError
from titan_muon.removed import removed_value

Coefficients = tuple[tuple[float, float, float], ...]
"""(a, b, c) of each step."""


def scaled(factor: float, *steps: tuple[float, float, float]) -> Coefficients:
    """Steps for singular values of `factor` times the size."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in steps)


PROMOTION, SUPPRESSION = (1.875, -1.25, 0.375), (0.0, 2.5, -1.5)
"""Pion's two steps. Suppression sends singular values below sqrt(2/3) to 0 and above to 1."""

COEFFICIENTS: Mapping[str, Coefficients] = {
    # Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); torch.optim.Muon's default.
    "keller_jordan": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng (2025), as used in Emerging-Optimizers and dion.
    "you_jiacheng": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., "The Polar Express" (arXiv:2505.16932), l = 1e-3, every step with a safety factor s = 1.05:
    # (a / s, b / s^3, c / s^5). As in gram-newton-schulz and dmuon.
    "polar_express": (
        (7.8925828744, -20.3830139459, 13.5553061494),
        (3.9114848681, -2.5464635929, 0.426898832),
        (3.7606579557, -2.5128190182, 0.4323647349),
        (3.1603996737, -2.1496495189, 0.3996366908),
        (2.1910971619, -1.4416620102, 0.3281464876),
    ),
    # The same with "safety 2e-2, cushion 2", as in modded-nanogpt, nanochat and dion; the first step divides by 1.02.
    "polar_express_cushion": (
        *scaled(1.02, (8.156554524902461, -22.48329292557795, 15.878769915207462)),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # DeepSeek-V4's ten steps, as in Emerging-Optimizers: eight to grow singular values, two to pull them to 1.
    "deepseek_v4": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
    # Grishina et al., "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials"
    # (CANS, arXiv:2506.10935), as in Emerging-Optimizers. Each step ends where the next begins to diverge. So all but
    # the last get a safety factor s, (a / s, b / s^3, c / s^5), as in section 4 of The Polar Express (2505.16932).
    "cans": (
        *scaled(
            1.02,
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
        ),
        (2.2737, -1.6447, 0.4162),
    ),
    # Fan et al., "Rethinking Muon Beyond Pretraining" (Pion, arXiv:2605.19282): a high-pass filter. The authors' code
    # takes only suppression for reinforcement learning (k_p = 0). Promotion lowers the threshold of the filter.
    "pion": (SUPPRESSION,),
    "pion_promotion": (PROMOTION, *(SUPPRESSION,) * 4),
}
"""A set of one step is repeated. Longer sets have a fixed number of steps, or go on in CONTINUED."""

CONTINUED: Mapping[str, Coefficients] = {
    # The paper's steps 6 and 7, with the same safety, and all later steps, which need no safety.
    "polar_express": (
        *scaled(
            1.05,
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        ),
        (1.875, -1.25, 0.375),
    ),
}
"""Steps after those of COEFFICIENTS. The last step is repeated."""


def coefficients(choice: str | Sequence[Sequence[float]], steps: int) -> Coefficients:
    """(a, b, c) for each step, from the name of a set, a list of `steps` triples, or a single triple.

    Raises OptionError for an unknown name, a wrong number of steps, or an invalid triple.
    """
    if steps < 1:
        raise OptionError("ns_steps", f"= {steps} must be at least 1")
    if isinstance(choice, str):
        if choice not in COEFFICIENTS:
            matches = difflib.get_close_matches(choice, COEFFICIENTS, 1)
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            problem = f"= {choice!r} is not one of {', '.join(COEFFICIENTS)}{hint}"
            raise OptionError("ns_coefficients", removed_value("ns_coefficients", choice) or problem)
        table = COEFFICIENTS[choice]
        rows = table * steps if len(table) == 1 else table
        if steps > len(rows) and choice in CONTINUED:
            rows = (*rows, *CONTINUED[choice])[:steps]
            rows = (*rows, *rows[-1:] * (steps - len(rows)))
    else:
        rows = tuple(_triple(row) for row in choice)
        rows = rows * steps if len(rows) == 1 else rows
    if len(rows) != steps:
        raise OptionError("ns_coefficients", f"has {len(rows)} steps but ns_steps = {steps}; make them equal")
    return rows


def _triple(row: object) -> tuple[float, float, float]:
    numbers = tuple(row) if isinstance(row, Sequence) and not isinstance(row, str) else ()
    if len(numbers) != 3 or not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        raise OptionError("ns_coefficients", f"has {row!r}, which is not three finite numbers (a, b, c)")
    a, b, c = numbers
    return float(a), float(b), float(c)


@dataclass(frozen=True)
class Iteration:
    """Name of the coefficients, (a, b, c) of each step, and the least norm."""

    name: str
    steps: Coefficients
    eps: float

    def __str__(self) -> str:
        return f"{self.name} x {len(self.steps)}, eps {self.eps:g}"


def iteration(choice: str | Sequence[Sequence[float]], steps: int, eps: float) -> Iteration:
    """A named set of coefficients or custom triples. Raises OptionError like `coefficients`."""
    rows = coefficients(choice, steps)
    return Iteration(choice if isinstance(choice, str) else str(rows), rows, eps)
