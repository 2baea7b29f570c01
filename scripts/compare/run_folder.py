"""Run folders: `recipe.toml` and `metrics.jsonl`, read without torch."""

import json
import math
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median

import tomli

RECIPE, METRICS, LATEST = "recipe.toml", "metrics.jsonl", "latest"
PLACE = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})
"""Keys that say where a run is, and nothing of what it computes."""
MOST_KEYS, LONGEST_LABEL = 4, 60
LOSSES = {"loss": "Training loss", "val_loss": "Validation loss", "bits_per_byte": "Bits per byte"}

Series = dict[int, float]
"""A recorded quantity by step, in ascending order."""


class RunError(ValueError):
    """The input cannot be compared; the message names the input, the problem and the remedy."""


@dataclass(frozen=True)
class RunRecord:
    """Record of a run.

    Attributes:
        label: short name, unique in a comparison.
        folder: source folder.
        recipe: values by dotted key, as JSON text.
        series: recorded numbers by dotted field (`loss`, `time.optimizer`), then by step.
        tokens_per_step: tokens of a training step over all ranks; None if not recorded.
    """

    label: str
    folder: Path
    recipe: dict[str, str]
    series: dict[str, Series]
    tokens_per_step: float | None

    def of(self, key: str) -> Series:
        """Series of `key`; empty if not recorded."""
        return self.series.get(key, {})

    def by_tokens(self) -> "RunRecord":
        """The same run by tokens instead of steps, without records that have no tokens."""
        tokens = {step: round(count) for step, count in self.of("tokens").items()}
        series = {
            key: {tokens[step]: value for step, value in values.items() if step in tokens}
            for key, values in self.series.items()
        }
        return replace(self, series=series)

    def median(self, key: str) -> float | None:
        """Median of the finite values of `key`; None without finite values."""
        values = [value for value in self.of(key).values() if math.isfinite(value)]
        return median(values) if values else None


def find_run(path: Path) -> Path:
    """The run folder `path`, or the newest run with a logged step in a folder of runs."""
    if not path.is_dir():
        raise RunError(f"{path}: no such folder")
    if (path / RECIPE).exists() or (path / METRICS).exists():
        for file in (path / RECIPE, path / METRICS):
            if not file.is_file():
                raise RunError(f"{file}: no such file; a run folder has {RECIPE} and {METRICS}")
        return path
    files = [file for file in path.glob(f"*/{METRICS}") if file.stat().st_size > 0]
    folders = [file.parent for file in files if file.with_name(RECIPE).is_file()]
    if not folders:
        raise RunError(f"{path}: neither a run ({RECIPE}, {METRICS}) nor a folder with runs that logged a step")
    # By time only, not by the differences behind the time.
    return max(folders, key=lambda folder: folder.name.partition("_")[0])


def _is_no_run(path: Path) -> bool:
    """Whether `runs/recipe/*` matches `path` only because the shell cannot know: the file `latest`, or an empty run."""
    if path.name == LATEST and path.is_file():
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


def read_recipe(file: Path) -> dict[str, str]:
    """A recipe's values by dotted key, as JSON text, to distinguish 1, 1.0 and true."""
    try:
        document = tomli.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file}: not TOML: {error}") from error
    return {key: json.dumps(value, default=str) for key, value in flatten(document).items()}


def read_records(file: Path) -> list[dict[str, object]]:
    """Records of a metrics file. Torn lines, as after a crash, are reported once on stderr."""
    records, torn = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line.strip():
            torn.append(str(number))
    if torn:
        print(f"{file}: skipped what is not a whole record: line {', '.join(torn)}", file=sys.stderr)
    if not records:
        raise RunError(f"{file}: no record; the run has not logged a step")
    return records


def read_series(file: Path) -> dict[str, Series]:
    """Numbers of a metrics file by field and step; the last record of a step and field counts.

    Training and validation both record `seconds`, so each loss also gets `seconds.<loss>`.
    """
    series: dict[str, Series] = {}
    for record in sorted(read_records(file), key=step_of):
        numbers = flatten(record)
        if "seconds" in numbers:
            numbers |= {f"seconds.{loss}": numbers["seconds"] for loss in LOSSES if loss in numbers}
        for key, value in numbers.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(key, {})[step_of(record)] = float(value)
    return series


def tokens_per_step(tokens: Series) -> float | None:
    """Median growth of the tokens per step; None if not recorded."""
    counts = [(0, 0.0), *tokens.items()]
    growth = [(count - before) / (step - last) for (last, before), (step, count) in pairwise(counts)]
    return median(growth) if growth else None


def step_of(record: dict[str, object]) -> int:
    """The step of a record."""
    step = record["step"]
    assert isinstance(step, int), "read_records keeps only records with a step"
    return step


def unique_labels(folders: Sequence[Path], recipes: Sequence[dict[str, str]]) -> list[str]:
    """The recipes' names (`runs/<recipe>/<time>`). Where two are equal, `key=value` of the first keys that tell all
    runs apart; where no keys do, as much of the path as differs.
    """
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise RunError(f"{folder}: the same run is given twice")
    names = [path.parent.name for path in paths]
    if len(set(names)) == len(names):
        return names
    values = [{key: value for key, value in recipe.items() if key not in PLACE} for recipe in recipes]
    differing = [key for key in dict.fromkeys(chain(*values)) if len({value.get(key) for value in values}) > 1]
    for count in range(1, MOST_KEYS + 1):
        labels = [_differences(value, differing[:count]) for value in values]
        if len(set(labels)) == len(labels) and max(map(len, labels)) <= LONGEST_LABEL:
            return labels
    depth = 1
    while len(set(labels)) < len(labels):
        depth += 1
        labels = ["/".join(path.parts[-depth:]) for path in paths]
    # The recipe's name, if all are runs of it.
    same = len(os.path.commonpath(labels))
    return [label[same:].removeprefix("/") for label in labels]


def _differences(values: dict[str, str], keys: Sequence[str]) -> str:
    """`lr=0.01 placement=owned`, for a legend."""
    return " ".join(f"{_leaf(key)}={values.get(key, 'absent')}" for key in keys).replace('"', "")


def _leaf(key: str) -> str:
    # `muon` alone says nothing of a placement, nor does `lr` of whose.
    table, _, leaf = key.rpartition(".")
    return table if leaf == "muon" else key if leaf in ("lr", "weight_decay") else leaf


def read_runs(paths: Sequence[Path], metric: str, axis: str = "step") -> list[RunRecord]:
    """Read the runs `paths`, in order, with series by step or by tokens.

    Raises RunError for fewer than two runs, an unreadable run, or runs without a common step with `metric`.
    """
    folders = [find_run(path) for path in paths if not _is_no_run(path)]
    if len(folders) < 2:
        raise RunError(f"a comparison takes two or more runs, not {len(folders)}")
    recipes = [read_recipe(folder / RECIPE) for folder in folders]
    labels, metrics = unique_labels(folders, recipes), [folder / METRICS for folder in folders]
    runs = [
        RunRecord(label, folder, recipe, series, tokens_per_step(series.get("tokens", {})))
        for label, folder, recipe, series in zip(labels, folders, recipes, map(read_series, metrics), strict=True)
    ]
    if axis == "tokens":
        for run in runs:
            if run.tokens_per_step is None:
                raise RunError(f"{run.folder / METRICS}: `tokens` was not recorded; compare with --axis step")
        runs = [run.by_tokens() for run in runs]
    for run in runs:
        if not run.of(metric):
            raise RunError(f"{run.folder / METRICS}: `{metric}` was not recorded")
    if not common_steps(runs, metric):
        raise RunError(f"{', '.join(labels)}: no {axis} at which each of them recorded `{metric}`")
    return runs


def common_steps(runs: Sequence[RunRecord], key: str) -> list[int]:
    """Steps at which every run recorded `key`, in order."""
    return sorted(set.intersection(*(set(run.of(key)) for run in runs)))


def smoothing_window(steps: Sequence[int], axis: str = "step") -> int:
    """Moving-average window in steps or tokens, equal for all runs: a twentieth of the last step, at most 100."""
    share = max(1, steps[-1] // 20)
    return share if axis == "tokens" else min(100, share)


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
