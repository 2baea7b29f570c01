"""Compare runs: differences of recipes, losses, steps to reach a loss, speed, and a picture.

Reads only the files of run folders, so it needs neither torch nor the run's machine, and works for unfinished runs.
Tables are Markdown.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from titan_muon.trainer.commands.records import (
    LOSSES,
    PICTURE,
    RunRecord,
    Series,
    common_steps,
    read_runs,
    smooth,
    smoothing_window,
)
from titan_muon.trainer.recipe import RecipeError

ABSENT = "-"

# Okabe and Ito's colors, distinct for all color vision; lines and markers differ for print without color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FEW = 30
"""A curve with fewer steps has a dot for each step."""
# Folder names may have "$", which begins a formula in matplotlib.
STYLE: dict[Any, Any] = {"font.size": 12, "svg.hashsalt": "compare_runs", "text.parse_math": False}
LINES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D")


SPEEDS: dict[str, tuple[str, float, int]] = {
    "tokens_per_second": ("tokens/s", 1, 0),
    "mfu": ("MFU, %", 100, 1),
    "time.step": ("step, ms", 1e3, 1),
    "time.data": ("data, ms", 1e3, 1),
    "time.forward_backward": ("forward-backward, ms", 1e3, 1),
    "time.clip": ("clip, ms", 1e3, 1),
    "time.optimizer": ("optimizer, ms", 1e3, 1),
    "memory_gib": ("peak memory, GiB", 1, 2),
}
"""Name and unit, factor from the recorded unit, and digits of a speed or memory."""


def evenly(steps: Sequence[int], intervals: int = 10) -> list[int]:
    """At most `intervals` + 1 of `steps`: the first, the last and evenly spaced steps between."""
    if len(steps) <= intervals + 1:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / intervals)] for i in range(intervals + 1)]


def thresholds(curves: dict[str, Series]) -> dict[str, float]:
    """Losses to reach, by name, highest first: each run's last loss, and halvings of the way from the start.

    `curves`: smoothed losses by the run's label. A run that ended in NaN or infinity sets no threshold.
    """
    values = {label: list(curve.values()) for label, curve in curves.items()}
    finite = {label: losses for label, losses in values.items() if math.isfinite(losses[-1])}
    if not finite:
        return {}
    named = {f"{losses[-1]:.4f} (last of {label})": losses[-1] for label, losses in finite.items()}
    start, end = min(losses[0] for losses in finite.values()), max(named.values())
    halves = [end + (start - end) / 2**k for k in (1, 2, 3) if start > end]
    named |= {f"{loss:.4f}": loss for loss in halves}
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def markdown(corner: str, runs: Sequence[RunRecord], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table with a column per run: the first aligned left, the others right."""
    table = [[corner, *(run.label for run in runs)], *rows]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in table]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(cells[0]))]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    padded = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in cells
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def with_differences(values: Sequence[float]) -> list[str]:
    """Cells of `values`, with differences to the first value."""
    first, *others = values
    return [f"{first:.4f}", *(f"{value:.4f} ({value - first:+.4f})" for value in others)]


def with_ratios(values: Sequence[float | None], digits: int) -> list[str]:
    """Cells of `values`, with ratios to the first value where both exist."""
    first = values[0]
    cells = [ABSENT if value is None else f"{value:.{digits}f}" for value in values]
    for i, value in enumerate(values[1:], start=1):
        if value is not None and first is not None and first != 0:
            cells[i] += f" ({value / first:.2f}x)"
    return cells


def recipe_section(runs: Sequence[RunRecord]) -> str:
    """Differing keys, the ranks, and the tokens per step, with a warning if these differ."""
    tokens = [run.tokens_per_step for run in runs]
    row = ["tokens a step", *(ABSENT if count is None else f"{count:,.0f}" for count in tokens)]
    ranks = ["ranks", *(ABSENT if run.ranks is None else str(run.ranks) for run in runs)]
    known = {count for count in tokens if count is not None}
    recorded = [cells for cells in (ranks, row) if set(cells[1:]) != {ABSENT}]
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    rows = [[key, *(run.recipe.get(key, ABSENT) for run in runs)] for key in keys]
    differing = [cells for cells in rows if len(set(cells[1:])) > 1]
    parts = [markdown("key", runs, differing) if differing else "The recipes are the same."]
    if recorded:
        parts.append(markdown("batch", runs, recorded))
    if len(known) > 1:
        parts.append(
            "Warning: the runs do not train on the same tokens in a step: their losses at a step cannot be compared. "
            "Give their recipes the same training.global_batch_size and seq_len."
        )
    return "\n\n".join(parts)


def loss_section(runs: Sequence[RunRecord], key: str) -> str:
    """`key` at common steps, and at each run's end if the ends differ."""
    missing = [run.label for run in runs if not run.of(key)]
    if missing:
        return f"Not recorded by {', '.join(missing)}."
    steps = evenly(common_steps(runs, key))
    rows = [[f"{step:,}", *with_differences([run.of(key)[step] for run in runs])] for step in steps]
    ends = [max(run.of(key)) for run in runs]
    if not steps or len(set(ends)) > 1:
        lasts = with_differences([run.of(key)[end] for run, end in zip(runs, ends, strict=True)])
        rows.append(["end", *(f"step {end:,}: {last}" for end, last in zip(ends, lasts, strict=True))])
    if any(run.seeds > 1 for run in runs):
        deviations = [list(run.spread.get(key, {}).values())[-1:] for run in runs]
        rows.append(["± over seeds", *(f"{value[0]:.4f}" if value else ABSENT for value in deviations)])
    return markdown("step", runs, rows)


def reach_section(runs: Sequence[RunRecord], key: str, window: int) -> str:
    """Steps until the smoothed `key` first reaches each threshold."""
    curves = {run.label: smooth(run.of(key), window) for run in runs}
    rows = [
        [
            name,
            *with_ratios([next((step for step in curve if curve[step] <= loss), None) for curve in curves.values()], 0),
        ]
        for name, loss in thresholds(curves).items()
    ]
    if not rows:
        return "No run ended with a finite value."
    return f"Means of the last {window} steps; ratios to {runs[0].label}.\n\n{markdown('steps to', runs, rows)}"


def speed_section(runs: Sequence[RunRecord]) -> str:
    """Medians of throughput, step phases and peak memory, and ratios to the first run."""
    rows = []
    for key, (title, scale, digits) in SPEEDS.items():
        medians = [run.median(key) for run in runs]
        if any(value is not None for value in medians):
            shown = [None if value is None else value * scale for value in medians]
            rows.append([title, *with_ratios(shown, digits)])
    return markdown("median", runs, rows) if rows else "Not recorded."


def report(runs: Sequence[RunRecord], metric: str, window: int) -> str:
    """The whole text: the runs, then the sections."""
    ends = [max(step for key in LOSSES for step in run.of(key)) for run in runs]
    names = [f"- {run.label}: {run.folder}, to step {end:,}" for run, end in zip(runs, ends, strict=True)]
    sections = {"Recipe": recipe_section(runs)}
    sections |= {title: loss_section(runs, key) for key, title in LOSSES.items()}
    sections[f"{LOSSES[metric]} to reach"] = reach_section(runs, metric, window)
    sections["Speed"] = speed_section(runs)
    return "\n\n".join(["\n".join(names), *(f"## {title}\n\n{text}" for title, text in sections.items())])


def plot_curves(axes: Axes, runs: Sequence[RunRecord], metric: str, window: int) -> None:
    """Draw the smoothed `metric` over the thin raw line, and with the training loss the validation loss as markers.

    Runs over seeds have a band of a standard deviation instead of the raw line.
    """
    title = LOSSES[metric] if window == 1 else f"{LOSSES[metric]} (mean of the last {window} steps)"
    validated = metric == "loss" and any(run.of("val_loss") for run in runs)
    for i, run in enumerate(runs):
        color, line = COLORS[i % len(COLORS)], LINES[i % len(LINES)]
        marker = MARKERS[i % len(MARKERS)] if validated and run.of("val_loss") else ""
        raw, curve, validation = run.of(metric), smooth(run.of(metric), window), run.of("val_loss")
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 8, "markeredgecolor": "white"}
        if deviations := smooth(run.spread.get(metric, {}), window):
            low, high = ([curve[place] + sign * deviations[place] for place in curve] for sign in (-1, 1))
            axes.fill_between([*curve], low, high, color=color, alpha=0.15, linewidth=0)
        else:
            axes.plot([*raw], [*raw.values()], color=color, linewidth=0.8, alpha=0.4)
        # With few logged steps, the line alone does not show the steps.
        dots = "." if len(curve) < FEW else ""
        axes.plot([*curve], [*curve.values()], color=color, linestyle=line, linewidth=2, marker=dots, label=run.label)
        if marker:
            axes.plot([*validation], [*validation.values()], linestyle="", **style)
    axes.set_xlabel("step")
    # A rounded label of half a step names a wrong place.
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("bits per byte" if metric == "bits_per_byte" else "loss (nats per token)")
    axes.set_title(f"{title}; markers: validation" if validated else title)
    axes.grid(alpha=0.3)


def picture(runs: Sequence[RunRecord], metric: str, window: int, title: str | None) -> Figure:
    """The curves, and the runs' labels below; 1200 pixels wide."""
    # As many columns as fit into the width.
    columns = max(1, min(len(runs), 120 // (8 + max(len(run.label) for run in runs))))
    height = 5 + 0.25 * -(-len(runs) // columns)
    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    plot_curves(figure.subplots(), runs, metric, window)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    if title is not None:
        figure.suptitle(title, fontweight="bold")
    return figure


def compare(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    output: Path | None = None,
    metric: Literal["loss", "val_loss", "bits_per_byte"] = "loss",
    title: str | None = None,
) -> None:
    """Compare two or more runs, the others to the first. Runs that differ by their seeds alone are one curve with a
    band of a standard deviation.

    Args:
        runs: Run folders (recipe.toml, metrics.jsonl), or folders of a recipe's runs, for the newest run.
        output: The picture, .png or .svg; default: compare.png in the folder that has all the runs.
        metric: Metric to reach and to draw; `loss` also draws the validation loss.
        title: Heading of the picture.
    """
    if output is not None and output.suffix not in (".png", ".svg"):
        raise RecipeError(f"--output {output}: the suffix must be .png or .svg")
    if output is not None and not output.parent.is_dir():
        raise RecipeError(f"--output {output}: there is no folder {output.parent}")
    records = read_runs(runs, metric)
    window = smoothing_window(common_steps(records, metric))
    print(report(records, metric, window))
    file = output or Path(os.path.commonpath([run.folder.resolve().parent for run in records]), PICTURE)
    with rc_context(STYLE):
        figure = picture(records, metric, window, title)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    print(f"\nPicture: {file}")
