"""Report of a sweep: JSON, a Markdown table with a row for each setting, and a picture."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.run_folder import SEEDS, RunRecord, Series, labelled, over_seeds, smoothing_window
from compare.run_picture import COLORS, LINES, MARKERS, plot_curves

NAME = "sweep"
ROOT = Path(__file__).resolve().parents[2]


def has_seed(key: str) -> bool:
    """Whether a swept key sets seeds alone."""
    return set(key.split("+")) <= SEEDS | {"training.seed"}


@dataclass(frozen=True)
class Header:
    """Origin of a sweep."""

    command: str
    date: str
    commit: str
    torch: str
    machine: str
    runs: int
    processes: int

    @classmethod
    def now(cls, command: str, runs: int, processes: int) -> "Header":
        """The origin of a sweep of this checkout on this machine."""
        machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
        return cls(command, datetime.now(UTC).date().isoformat(), commit(), version("torch"), machine, runs, processes)


def commit() -> str:
    """The commit of this checkout; "unknown" outside of a repository."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


@dataclass(frozen=True)
class Result:
    """Result of a run. `keys`: of the recipe, with another value than the default. `setting` and `seed`: values by
    swept key. Losses by step, in nats per token. Seconds: medians of a step, and of its optimizers.
    """

    recipe: str
    keys: dict[str, Any]
    setting: dict[str, str]
    seed: dict[str, str]
    error: str | None
    tokens: int
    step_seconds: float | None
    loss: Series
    val_loss: Series
    optimizer_seconds: float | None = None


@dataclass(frozen=True)
class Setting:
    """The runs of a setting, which differ by their seeds."""

    recipe: str
    values: dict[str, str]
    results: Sequence[Result]

    @property
    def finished(self) -> list[Result]:
        return [result for result in self.results if result.error is None]

    @property
    def rate(self) -> float | None:
        """The learning rate, if one was swept."""
        rates = [value for key, value in self.values.items() if key.endswith(".lr")]
        return float(rates[0]) if len(rates) == 1 else None

    def label(self, *, with_rate: bool = True) -> str:
        """The recipe and the swept values."""
        shown = [f"{k}={v}" for k, v in self.values.items() if with_rate or not k.endswith(".lr")]
        return " ".join([self.recipe, *shown])

    def record(self) -> RunRecord:
        """The finished runs as a curve."""
        label = labelled(self.label(), len(self.finished))
        curves = ({"loss": run.loss, "val_loss": run.val_loss} for run in self.finished)
        return over_seeds([RunRecord(label, Path(), {}, series, None) for series in curves])


def settings(results: Sequence[Result]) -> list[Setting]:
    """All settings, in the order of their first runs."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(repr((result.recipe, result.setting)), []).append(result)
    return [Setting(group[0].recipe, group[0].setting, group) for group in groups.values()]


def finals(setting: Setting) -> list[float]:
    """Last held-out losses of the finished runs; without validation mean training losses of the last tenth."""
    return [final_loss(result) for result in setting.finished]


def final_loss(result: Result) -> float:
    """Last held-out loss; without validation the mean training loss of the last tenth of the steps."""
    if result.val_loss:
        return list(result.val_loss.values())[-1]
    last = max(result.loss)
    return fmean(loss for step, loss in result.loss.items() if step > 0.9 * last or step == last)


def best_loss(result: Result) -> float:
    """Least held-out loss; without validation the least training loss."""
    return min((result.val_loss or result.loss).values())


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation as text; a dash for no values."""
    if not values:
        return "-"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def finished_results(folder: Path) -> list[Result]:
    """The results without an error of an earlier report in `folder`; none without a report."""
    file = folder / f"{NAME}.json"
    if not file.is_file():
        return []
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["results"]
        results = [Result(**{"keys": {}} | result) for result in listed]
    except (ValueError, KeyError, TypeError) as error:
        print(f"warning: {file} is damaged ({error!r}), and its results are lost", file=sys.stderr)
        return []
    return [
        replace(result, loss=_by_step(result.loss), val_loss=_by_step(result.val_loss))
        for result in results
        if result.error is None
    ]


def _by_step(losses: Series) -> Series:
    # JSON has text keys alone.
    return {int(step): loss for step, loss in losses.items()}


def write_report(folder: Path, header: Header, results: Sequence[Result]) -> str:
    """Write the three files. Returns the table and the paths as text."""
    folder.mkdir(parents=True, exist_ok=True)
    document = asdict(header) | {"results": [asdict(result) for result in results]}
    files = [folder / f"{NAME}.{suffix}" for suffix in ("json", "md", "png")]
    # A kill must not lose the results of earlier runs.
    partial = files[0].with_suffix(".partial")
    partial.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(partial, files[0])
    groups = settings(results)
    files[1].write_text(page(header, groups), encoding="utf-8")
    drawn = [setting for setting in groups if setting.finished]
    if drawn:
        picture(drawn).savefig(files[2])
    return "\n".join([*table(groups), "", *(str(file) for file in files if file.exists())])


def table(groups: Sequence[Setting]) -> list[str]:
    """Lines of the table; the best setting of each recipe is bold."""
    keys = list(dict.fromkeys(key for setting in groups for key in setting.values))
    best = {
        recipe: min(
            (mean(finals(setting)) for setting in groups if setting.recipe == recipe and setting.finished), default=None
        )
        for recipe in {setting.recipe for setting in groups}
    }
    lines = ["| recipe | " + "".join(f"{key} | " for key in keys) + "runs | final loss | best loss | s a step |"]
    lines.append("|---|" + "---|" * (len(keys) + 4))
    for setting in groups:
        losses, seconds = (
            finals(setting),
            [run.step_seconds for run in setting.finished if run.step_seconds is not None],
        )
        final = spread(losses)
        if losses and mean(losses) == best[setting.recipe]:
            final = f"**{final}**"
        failed = len(setting.results) - len(losses)
        cells = [
            setting.recipe,
            *(setting.values.get(key, "-") for key in keys),
            f"{len(losses)}" + (f", {failed} failed" if failed else ""),
            final,
            spread([best_loss(run) for run in setting.finished]),
            spread(seconds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(header: Header, groups: Sequence[Setting]) -> str:
    """The Markdown page."""
    results = [result for setting in groups for result in setting.results]
    tokens = sorted({result.tokens for result in results if result.error is None})
    held_out = all(result.val_loss for result in results if result.error is None)
    loss = (
        "Losses are held-out losses" if held_out else "Losses are training losses, the final of the last tenth of steps"
    )
    lines = [
        f"# Sweep of {', '.join(dict.fromkeys(setting.recipe for setting in groups))}",
        "",
        f"`{header.command}`",
        "",
        f"{header.date}, commit {header.commit}, PyTorch {header.torch}, {header.machine}.",
        f"Processes of a run: {header.processes}. Tokens: {', '.join(f'{count:,}' for count in tokens) or 'none'}.",
        f"{loss} in nats per token, mean ± standard deviation over seeds. Bold: the least final loss of each recipe.",
        "Seconds a step are medians; other work on the machine makes them longer.",
        "",
        *([f"**Incomplete: {len(results)} of {header.runs} runs.**", ""] if len(results) < header.runs else []),
        *table(groups),
        "",
        *(
            f"- Failed: {result.recipe} {result.setting} {result.seed}: {result.error}"
            for result in results
            if result.error
        ),
        f"![Curves, and the final loss by learning rate]({NAME}.png)",
        "",
    ]
    return "\n".join(lines)


def picture(groups: Sequence[Setting]) -> Figure:
    """A curve for each setting, with a band over seeds. With a swept rate: curves of the best rates, and the final loss
    by rate.
    """
    by_rate: dict[str, list[Setting]] = {}
    for setting in groups:
        by_rate.setdefault(setting.label(with_rate=setting.rate is None), []).append(setting)
    shown = [min(group, key=lambda setting: mean(finals(setting))) for group in by_rate.values()]
    has_rates = any(len(group) > 1 for group in by_rate.values())
    figure = Figure(figsize=(12, 5 + 0.2 * len(shown)), dpi=100, layout="constrained")
    curves, *others = figure.subplots(1, 1 + has_rates, squeeze=False)[0]
    records = [setting.record() for setting in shown]
    metric = "val_loss" if all(len(record.of("val_loss")) > 3 for record in records) else "loss"
    steps = [max(record.of(metric)) for record in records]
    window = 1 if metric == "val_loss" else smoothing_window(steps[:1])
    plot_curves(curves, records, metric, window, "step")
    if has_rates:
        curves.set_title("Best rates: " + curves.get_title().lower())
        draw_rates(others[0], by_rate)
    lines = [line for line in curves.get_lines() if line.get_linewidth() == 2]
    # Below the axes, where a legend hides no curve.
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "frameon": False, "fontsize": 9}
    curves.legend(lines, [record.label for record in records], **below)
    if has_rates:
        others[0].legend(**below)
    for legend in filter(None, (axes.get_legend() for axes in figure.axes)):
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def draw_rates(axes: Axes, groups: dict[str, list[Setting]]) -> None:
    """The final loss by rate, with error bars over seeds."""
    for i, (label, members) in enumerate(groups.items()):
        points = sorted((setting.rate, finals(setting)) for setting in members if setting.rate is not None)
        axes.errorbar(
            [rate for rate, _ in points],
            [mean(losses) for _, losses in points],
            yerr=[stdev(losses) if len(losses) > 1 else 0.0 for _, losses in points],
            color=COLORS[i % len(COLORS)],
            linestyle=LINES[i % len(LINES)],
            marker=MARKERS[i % len(MARKERS)],
            capsize=3,
            label=label,
        )
    axes.set(xscale="log", xlabel="learning rate", title="Final loss by learning rate")
    axes.grid(alpha=0.3)
