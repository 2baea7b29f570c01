"""Picture of bench_orthogonalize.py's figures: speedup over torch.optim.Muon's loop, and error."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt


def draw_picture(rows: Sequence[Any], errors: Sequence[Any], file: Path) -> None:
    """Write bars of `faster` for each `Row`, and the mean over all sets and shapes for the `ErrorRow`s."""
    figure, axes = plt.subplots(1, 2 if errors else 1, figsize=(14, 7), layout="constrained", squeeze=False)
    _speed(axes[0][0], rows)
    if errors:
        _error(axes[0][1], errors)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _speed(axis: Any, rows: Sequence[Any]) -> None:
    shown = [row for row in rows if row.faster != 1]
    labels = [f"{row.group}, {row.shape}: {row.name}" for row in shown]
    axis.barh(labels, [row.faster for row in shown], color="tab:blue")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("x as fast as the first of its group: torch.optim.Muon's loop, or standard in the same dtype")


def _error(axis: Any, errors: Sequence[Any]) -> None:
    spectra = list(dict.fromkeys(row.spectrum for row in errors))
    names = list(dict.fromkeys(row.name for row in errors if "float" in row.name))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        heights = []
        for spectrum in spectra:
            values = [row.error for row in errors if (row.name, row.spectrum) == (name, spectrum)]
            heights.append(exp(sum(map(log, values)) / len(values)))
        axis.bar([x + place * width for x in range(len(spectra))], heights, width, label=name)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(spectra))], spectra)
    axis.set_yscale("log")
    axis.set_ylabel("error against float64 (geometric mean over coefficients and shapes)")
    axis.legend()
