"""Writes the table of coefficient sets in docs/newton_schulz.md: errors of each set, measured in float32.

    python docs/make_coefficients.py

`tests/unit/docs/test_docs.py` fails where the page differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import relative_error, singular_band  # noqa: E402
from benchmarks.bench_orthogonalize import SPECTRA, hard_matrix  # noqa: E402
from titan_muon.engine.orthogonalize import COEFFICIENTS, Method, iteration, orthogonalize  # noqa: E402

PAGE = ROOT / "docs" / "newton_schulz.md"
BEGIN, END = "<!-- coefficients: written by docs/make_coefficients.py -->\n", "<!-- end of coefficients -->\n"
SHAPE = (128, 256)
LONGER = {"polar_express": (8,)}
"""Further numbers of steps."""


def rows() -> list[str]:
    """A line for each set and number of steps: distance to the polar factor, and the singular values."""
    lines = []
    matrices = {spectrum: hard_matrix(spectrum, *SHAPE)[None] for spectrum in SPECTRA}
    for name, table in COEFFICIENTS.items():
        for steps in (5 if len(table) == 1 else len(table), *LONGER.get(name, ())):
            computed, cells = iteration(name, steps, 1e-7), []
            for matrix in matrices.values():
                u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
                result = orthogonalize(matrix.float(), computed, Method("standard", "float32"))
                low, high = singular_band(result)
                cells.append(f"{relative_error(result, u @ vh).item():.2f} ({low.item():.2f} to {high.item():.2f})")
            lines.append(f"| `{name}` | {steps} | {' | '.join(cells)} |\n")
    return lines


def written(page: str) -> str:
    """The page with a new table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    header = f"| set | steps | {' | '.join(SPECTRA)} |\n|---|---|{'---|' * len(SPECTRA)}\n"
    return before + BEGIN + header + "".join(rows()) + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
