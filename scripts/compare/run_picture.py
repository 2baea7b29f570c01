"""Picture of a comparison: loss curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from compare.run_folder import LOSSES, RunRecord, amount, smooth

# Okabe and Ito's colors, distinct for all color vision; lines and markers differ for print without color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FEW, LONGEST = 30, 100
"""A curve with fewer steps has a dot for each step; characters of the longest label."""
# Folder names may have "$", which begins a formula in matplotlib.
STYLE: dict[Any, Any] = {"font.size": 12, "svg.hashsalt": "compare_runs", "text.parse_math": False}
LINES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D")


def plot_curves(axes: Axes, runs: Sequence[RunRecord], metric: str, window: float, axis: str) -> None:
    """Draw the smoothed `metric` over the thin raw line, and with the training loss the validation loss as markers.

    Runs over seeds have a band of a standard deviation instead of the raw line.
    """
    unit = axis.replace("step", "steps")
    title = LOSSES[metric] if window == 1 else f"{LOSSES[metric]} (mean of the last {amount(window)} {unit})"
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
        axes.plot([*curve], [*curve.values()], color=color, linestyle=line, linewidth=2, marker=dots)
        if marker:
            axes.plot([*validation], [*validation.values()], linestyle="", **style)
    axes.set_xlabel(axis)
    # A rounded label of half a step names a wrong place.
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("bits per byte" if metric == "bits_per_byte" else "loss (nats per token)")
    axes.set_title(f"{title}; markers: validation" if validated else title)
    axes.grid(alpha=0.3)


def legend_of(runs: Sequence[RunRecord], metric: str) -> list[Line2D]:
    """A line for each run in the style of the curve, with the run's label; long labels are cut in the middle."""
    validated = metric == "loss" and any(run.of("val_loss") for run in runs)
    handles = []
    for i, run in enumerate(runs):
        marker = MARKERS[i % len(MARKERS)] if validated and run.of("val_loss") else ""
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i % len(LINES)], "linewidth": 2}
        label = run.label if len(run.label) <= LONGEST else f"{run.label[: LONGEST // 2]}…{run.label[-LONGEST // 2 :]}"
        handles.append(Line2D([], [], marker=marker, markersize=8, markeredgecolor="white", label=label, **style))
    return handles


def write_picture(
    runs: Sequence[RunRecord], metric: str, window: float, title: str | None, output: Path, axis: str = "step"
) -> None:
    """Writes the picture."""
    with rc_context(STYLE):
        figure = picture(runs, metric, window, title, axis)
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def picture(runs: Sequence[RunRecord], metric: str, window: float, title: str | None, axis: str) -> Figure:
    """The curves, and the runs' labels below; 1200 pixels wide."""
    handles = legend_of(runs, metric)
    # As many columns as fit into the width.
    columns = max(1, min(len(runs), 120 // (8 + max(len(str(handle.get_label())) for handle in handles))))
    height = 5 + 0.25 * -(-len(runs) // columns)
    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    plot_curves(figure.subplots(), runs, metric, window, axis)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    if title is not None:
        figure.suptitle(title, fontweight="bold")
    return figure
