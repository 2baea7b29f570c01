"""One GPU, four calls of at most eight minutes: `make gpu CALL=1`. This file writes, reads and shows their rows."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAULT_CHARACTERS = 400
DOCS = ROOT / "docs/results"
DATA, PAGE, PICTURE = "gpu_calls.jsonl", "gpu.md", "gpu_loss.png"
HEAD = """# Figures of GPUs

`python -m benchmarks.gpu --page ROWS` writes this page from `gpu_calls.jsonl`, the rows of `make gpu`
([gpu.md](../gpu.md)). [h200_tables.md](h200_tables.md) has the figures of a former version of the benchmarks.
"""
NOT_RUN = "\nNo GPU has run the four calls.\n"
TITLES = {
    1: "Call 1: launches, and one rank of large worlds",
    2: "Call 2: contenders",
    3: "Call 3: exchange",
    4: "Call 4: training",
}
HIDDEN = ("call", "part", "source", "measured", "kernels", "log", "commands")
MOST_ROWS = 80
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """Appends rows of JSON to a file. Each is on the disk before the next measurement.

    Attributes:
        common: columns of every row.
        end: `time.monotonic` after which no measurement begins.
    """

    file: Path
    common: Mapping[str, Any]
    end: float = math.inf

    def write(self, **columns: Any) -> None:
        """Append a row. One write call, so that a process that is killed leaves whole lines."""
        line = json.dumps(_plain({**self.common, **columns}), allow_nan=False) + "\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        print(line, end="", flush=True)

    @contextmanager
    def faults(self, **columns: Any) -> Iterator[None]:
        """Turn an error of the block into a row, so that it does not cost later measurements."""
        try:
            yield
        except Exception as error:
            # Packages of other projects raise anything on an unknown machine.
            self.write(**columns, error=f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS])

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.end


def _plain(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last line that the machine cut off; none without a file."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def page(rows: Sequence[Row]) -> str:
    """The page of measured rows: a table for each part and measurement."""
    lines = [HEAD] if rows else [HEAD, NOT_RUN]
    tables: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        tables.setdefault((TITLES[row["call"]], row["part"], row.get("measured", "")), []).append(row)
    for title in TITLES.values():
        mine = {key: found for key, found in tables.items() if key[0] == title}
        lines += [f"\n## {title}\n"] if mine else []
        for (_, part, name), found in mine.items():
            lines += [f"\n### {part}{f': {name}' if name else ''}\n", table(summarized(found))]
            lines += [f"\n![Held-out loss by tokens and by seconds]({PICTURE})"] if held_out(found) else []
    return "\n".join(lines).rstrip() + "\n"


def held_out(rows: Iterable[Row]) -> list[Row]:
    """Records of trainings with a held-out loss."""
    return [row for row in rows if "val_loss" in row]


def summarized(rows: Sequence[Row]) -> Sequence[Row]:
    """Medians over the turns of each contender; the last held-out loss of a training; other rows as they are."""
    if held := held_out(rows):
        return held[-1:]
    if not any("turn" in row for row in rows):
        return rows
    turns: dict[str, list[Row]] = {}
    for row in rows:
        turns.setdefault(row["contender"], []).append(row)
    return [medians(contender, found) for contender, found in turns.items()]


def medians(contender: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A row with the medians of a contender's turns, the quartiles of the hot step, and its errors."""
    columns: dict[str, list[float]] = {}
    for key, value in (item for row in rows for item in row.items() if item[0].endswith(" ms")):
        columns.setdefault(key, []).append(value)
    hot = sorted(columns.get("device ms", []))
    return {
        "contender": contender,
        "turns": len(hot),
        **{key: median(values) for key, values in columns.items()},
        "quartiles": [hot[len(hot) // 4], hot[3 * len(hot) // 4]] if hot else [],
        "error": next((row["error"] for row in rows if "error" in row), None),
    }


def table(rows: Iterable[Row]) -> str:
    """Markdown table with a column for each key that has a value; nested keys by their own name."""
    flat = [{key: shown(value) for key, value in flattened(row).items() if key not in HIDDEN} for row in rows]
    keys = dict.fromkeys(key for row in flat[:MOST_ROWS] for key, cell in row.items() if cell)
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in flat[:MOST_ROWS])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if flat else ""


def flattened(row: Row) -> dict[str, Any]:
    """A row without nested tables."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells |= flattened(value) if isinstance(value, dict) else {key: value}
    return cells


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, list):
        return "" if len(value) > 8 else ", ".join(map(shown, value))
    if value is None or isinstance(value, (str, bool)):
        return "" if value is None else str(value).replace("|", "/").replace("\n", " ")
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Picture of the held-out loss of each training, by tokens and by seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for part in dict.fromkeys(row["part"] for row in rows):
        held = held_out(row for row in rows if row["part"] == part)
        for axis, x in zip(axes, ("tokens", "seconds"), strict=True):
            axis.plot([row[x] for row in held], [row["val_loss"] for row in held], label=part)
            axis.set_xlabel(x)
    axes[0].set_ylabel("held-out loss, nats a token")
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def publish(files: Sequence[Path], docs: Path = DOCS) -> None:
    """Add the measured rows of some files to the data, and write page and picture anew. Rehearsed rows are left out."""
    new = [row for file in files for row in read_rows(file) if row["source"] == "measured"]
    rows = [*read_rows(docs / DATA), *new]
    if new:
        (docs / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (docs / PAGE).write_text(page(rows), encoding="utf-8")
    if trainings := held_out(rows):
        draw(trainings, docs / PICTURE)
    print(f"{docs / PAGE}: {len(rows)} rows of the calls")
