"""Picture of a comparison: loss curves and step phases."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from compare.run_folder import LOSSES, RunRecord, amount, smooth

# Okabe and Ito's colors, distinct for all color vision; lines and markers differ for print without color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FEW, LONGEST = 30, 100
"""A curve with fewer steps has a dot for each step; characters of the longest label."""
# Folder names may have "$", which begins a formula in matplotlib.
STYLE: dict[Any, Any] = {"font.size": 12, "svg.hashsalt": "compare_runs", "text.parse_math": False}
LINES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D")


class Fill(NamedTuple):
    """Style of a step phase, in the color of the run."""

    title: str
    opacity: float
    hatch: str


FILLS = {
    "time.data": Fill("data", 0.0, "////"),
    "time.forward_backward": Fill("forward-backward", 0.3, ""),
    "time.clip": Fill("clip", 0.6, "xxxx"),
    "time.optimizer": Fill("optimizer", 1.0, ""),
}
REST = Fill("rest", 0.0, "")


def plot_curves(axes: Axes, runs: Sequence[RunRecord], metric: str, window: float, axis: str) -> None:
    """Draw the smoothed `metric` over the thin raw line, and with the training loss the validation loss as markers.

    Runs over seeds have a band of a standard deviation instead of the raw line.
    """
    unit = axis.replace("step", "steps")
    title = LOSSES[metric] if window == 1 else f"{LOSSES[metric]} (mean of the last {amount(window, axis)} {unit})"
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
    if axis != "seconds":
        # A rounded label of half a step names a wrong place.
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter("{x:,g}" if axis == "seconds" else "{x:,.0f}")
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


def plot_times(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw the medians of the step phases, a bar for each run, in the color of its curve."""
    longest = 0.0
    for i, run in enumerate(runs):
        color, left = COLORS[i % len(COLORS)], 0.0
        for fill, width in parts_of_step(run).items():
            face = to_rgba(color, fill.opacity)
            axes.barh(i, width, 0.45, left, color=face, edgecolor=color, hatch=fill.hatch)
            left += width
        axes.text(left, i, f" {left:.0f}" if left > 0 else " not recorded", va="center", fontsize="small")
        longest = max(longest, left)
    # Space for the numbers right of the bars and for the legend below.
    axes.set_xlim(0, longest * 1.2)
    axes.set_ylim(1.25 * len(runs) + 0.1, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("time (ms)")
    axes.set_title("Time of a step (medians)")
    grey = "0.5"
    legend = [
        Patch(facecolor=to_rgba(grey, fill.opacity), edgecolor=grey, hatch=fill.hatch, label=fill.title)
        for fill in (*FILLS.values(), REST)
    ]
    axes.legend(handles=legend, frameon=False, fontsize="small", loc="lower center", ncols=2, columnspacing=1)


def parts_of_step(run: RunRecord) -> dict[Fill, float]:
    """Medians of the recorded step phases in milliseconds, and the rest of the step."""
    medians = {fill: run.median(key) for key, fill in FILLS.items()}
    parts = {fill: seconds * 1e3 for fill, seconds in medians.items() if seconds is not None}
    step = run.median("time.step")
    if step is not None:
        parts[REST] = max(0.0, step * 1e3 - sum(parts.values()))
    return parts


def write_picture(
    runs: Sequence[RunRecord], metric: str, window: float, title: str | None, output: Path, axis: str = "step"
) -> None:
    """Writes the picture."""
    with rc_context(STYLE | {"hatch.linewidth": 0.6}):
        figure = picture(runs, metric, window, title, axis)
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def picture(runs: Sequence[RunRecord], metric: str, window: float, title: str | None, axis: str) -> Figure:
    """The curves, the parts of the step if any run recorded some, and the runs' labels below; 1200 pixels wide."""
    handles = legend_of(runs, metric)
    # As many columns as fit into the width.
    columns = max(1, min(len(runs), 120 // (8 + max(len(str(handle.get_label())) for handle in handles))))
    height = 5 + 0.25 * -(-len(runs) // columns)
    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    if any(parts_of_step(run) for run in runs):
        curves, times = figure.subplots(1, 2, width_ratios=(2, 1))
        plot_times(times, runs)
    else:
        curves = figure.subplots()
    plot_curves(curves, runs, metric, window, axis)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    if title is not None:
        figure.suptitle(title, fontweight="bold")
    return figure
