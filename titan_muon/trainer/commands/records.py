"""Records of runs for a comparison, without torch."""

import json
import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import LATEST, METRICS, PLACE, RunFolder

SEEDS = frozenset({"debug.seed", "data.seed"})
"""Keys with different values in the runs of a setting."""
PICTURE = "compare.png"
LOSSES = {"loss": "Training loss", "val_loss": "Validation loss", "bits_per_byte": "Bits per byte"}

Series = dict[int, float]
"""A recorded quantity by step, in ascending order."""


@dataclass(frozen=True)
class RunRecord:
    """Record of a run, or the mean of runs that differ only by seeds.

    Attributes:
        label: short name, unique in a comparison.
        folder: source folder.
        recipe: values by dotted key, as JSON text.
        series: recorded numbers by dotted field (`loss`, `time.optimizer`), then by step.
        tokens_per_step: tokens of a training step over all ranks; None if not recorded.
        ranks: number of the newest start; None if not recorded.
        seeds: number of runs.
        spread: standard deviations over the seeds, like `series`.
    """

    label: str
    folder: Path
    recipe: dict[str, str]
    series: dict[str, Series]
    tokens_per_step: float | None
    ranks: int | None = None
    seeds: int = 1
    spread: dict[str, Series] = field(default_factory=dict)

    def of(self, key: str) -> Series:
        """Series of `key`; empty if not recorded."""
        return self.series.get(key, {})

    def median(self, key: str) -> float | None:
        """Median of the finite values of `key`; None without finite values."""
        values = [value for value in self.of(key).values() if math.isfinite(value)]
        return median(values) if values else None


def _is_no_run(path: Path) -> bool:
    """Whether `path` is a file beside the runs or an empty run; the shell's `runs/recipe/*` matches both."""
    if path.is_file() and (path.name in (LATEST, PICTURE) or path.suffix == ".log"):
        return True
    empty = path.is_dir() and (path.parent / LATEST).is_file() and not (path / METRICS).is_file()
    if empty:
        print(f"{path}: passed over, because the run has logged no step", file=sys.stderr)
    return empty


def flatten(document: object, prefix: str = "") -> dict[str, object]:
    """Leaves of nested tables by dotted key; tables in a list are numbered from 0."""
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list) and document and all(isinstance(item, dict) for item in document):
        items = list(enumerate(document))
    else:
        return {prefix: document}
    leaves: dict[str, object] = {}
    for key, value in items:
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def read_series(run: RunFolder) -> dict[str, Series]:
    """Numbers of a run's metrics by field and step; the last record of a step and field counts."""
    series: dict[str, Series] = {}
    records = run.records()
    if not records:
        raise RecipeError(f"{run.path / METRICS}: no record; the run has not logged a step")
    for record in sorted(records, key=lambda record: record["step"]):
        for key, value in flatten(record).items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(key, {})[record["step"]] = float(value)
    return series


def tokens_per_step(tokens: Series) -> float | None:
    """Median growth of the tokens per step; None if not recorded."""
    counts = [(0, 0.0), *tokens.items()]
    growth = [(count - before) / (step - last) for (last, before), (step, count) in pairwise(counts)]
    return median(growth) if growth else None


def unique_labels(folders: Sequence[Path]) -> list[str]:
    """The shortest of recipe, typed keys, folder and path that tells the runs apart (`runs/<recipe>/<time>_<keys>`)."""
    paths = [folder.resolve() for folder in folders]
    recipes = [path.parent.name for path in paths]
    keys = [_without_seeds(path.name.partition("_")[2]) for path in paths]
    if len(set(recipes)) > 1:
        keys = [f"{recipe} {typed}".strip() for recipe, typed in zip(recipes, keys, strict=True)]
    for labels in (recipes, keys, [path.name for path in paths]):
        if all(labels) and len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _without_seeds(name: str) -> str:
    return ",".join(pair for pair in name.split(",") if pair.partition("=")[0] not in SEEDS)


def read_runs(paths: Sequence[Path], metric: str) -> list[RunRecord]:
    """Read the runs `paths`, in order. Runs that differ only by seeds are averaged.

    Raises RecipeError for fewer than two runs, an unreadable run, or runs without a common step with `metric`.
    """
    folders = [RunFolder.find(path).path for path in paths if not _is_no_run(path)]
    if len(folders) < 2:
        raise RecipeError(f"a comparison takes two or more runs, not {len(folders)}")
    if repeated := [folder for folder in folders if [path.resolve() for path in folders].count(folder.resolve()) > 1]:
        raise RecipeError(f"{repeated[0]}: the same run is given twice")
    settings: dict[str, list[RunRecord]] = {}
    for folder in folders:
        written, series = RunFolder(folder).written, read_series(RunFolder(folder))
        leaves = {part: value for key, entry in written.items() for part, value in flatten(entry, key).items()}
        # As JSON, to distinguish 1, 1.0 and true.
        recipe = {key: json.dumps(value, default=str) for key, value in leaves.items()}
        if metric not in series:
            raise RecipeError(f"{folder / METRICS}: `{metric}` was not recorded")
        ranks = RunFolder(folder).world_size
        setting = repr([ranks, *(item for item in recipe.items() if item[0] not in PLACE | SEEDS)])
        run = RunRecord("", folder, recipe, series, tokens_per_step(series.get("tokens", {})), ranks)
        # Runs of equal seeds are repetitions, to be compared with each other.
        while any(_seeds(run) == _seeds(other) for other in settings.get(setting, [])):
            setting += " again"
        settings.setdefault(setting, []).append(run)
    runs = [over_seeds(group) for group in settings.values()]
    labels = unique_labels([run.folder for run in runs])
    seeds = [f" ({run.seeds} seeds)" if run.seeds > 1 else "" for run in runs]
    runs = [replace(run, label=label + more) for run, label, more in zip(runs, labels, seeds, strict=True)]
    if not common_steps(runs, metric):
        raise RecipeError(f"{', '.join(labels)}: no step at which each of them recorded `{metric}`")
    return runs


def _seeds(run: RunRecord) -> list[str | None]:
    return [run.recipe.get(key) for key in sorted(SEEDS)]


def over_seeds(runs: Sequence[RunRecord]) -> RunRecord:
    """The mean of runs over their common steps; a single run unchanged."""
    if len(runs) == 1:
        return runs[0]
    series: dict[str, Series] = {}
    spread: dict[str, Series] = {}
    for key in runs[0].series:
        for step in common_steps(runs, key):
            values = [run.of(key)[step] for run in runs]
            series.setdefault(key, {})[step] = fmean(values)
            spread.setdefault(key, {})[step] = stdev(values) if all(map(math.isfinite, values)) else math.nan
    recipe = {key: value for key, value in runs[0].recipe.items() if key not in SEEDS}
    return replace(runs[0], recipe=recipe, series=series, spread=spread, seeds=len(runs))


def common_steps(runs: Sequence[RunRecord], key: str) -> list[int]:
    """Steps with `key` in every run, in order."""
    return sorted(set.intersection(*(set(run.of(key)) for run in runs)))


def smoothing_window(steps: Sequence[int]) -> int:
    """Steps of the moving average, equal for all runs: a twentieth of the last step, at most 100."""
    return min(100, max(1, steps[-1] // 20))


def smooth(series: Series, window: int) -> Series:
    """Mean over the last `window` steps, or over the last fifth of the steps if shorter, because early losses fall
    fast.
    """
    steps, values = list(series), list(series.values())
    smoothed = {}
    for i, step in enumerate(steps):
        start = bisect_right(steps, step - max(1, min(window, step // 5)))
        smoothed[step] = fmean(values[start : i + 1])
    return smoothed
