"""One GPU, four calls of at most eight minutes: `make gpu CALL=1`. This file writes, reads and shows their rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
HIDDEN = ("call", "source", "measured", "kernels", "log")
MOST_ROWS = 80
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """Appends rows of JSON with `common` columns to a file. Each is on the disk before the next measurement."""

    file: Path
    common: Mapping[str, Any]

    def write(self, **columns: Any) -> None:
        """Append a row. One write call, so that a process that is killed leaves whole lines."""
        # JSON has neither NaN nor infinity.
        row = json.loads(json.dumps({**self.common, **columns}), parse_constant=str)
        line = json.dumps(row) + "\n"
        with self.file.open("ab", buffering=0) as handle:
            handle.write(line.encode())
            os.fsync(handle.fileno())
        print(line, end="", flush=True)

    def measure(self, run: Callable[[], Row], **columns: Any) -> None:
        """Append a row with the columns that `run` returns, or with its error, which costs no later measurement."""
        try:
            measured = run()
        except Exception as error:
            # Packages of other projects raise anything on an unknown machine.
            measured = {"error": f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS]}
        self.write(**{**columns, **measured})


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
    """The page of measured rows: a table for each measurement of a call."""
    lines = [HEAD if rows else HEAD + "\nNo GPU has run the four calls.\n"]
    tables: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["call"]):
        tables.setdefault(f"Call {row['call']}: {row.get('measured', 'parts')}", []).append(row)
    for title, found in tables.items():
        lines += [f"\n## {title}\n", table(summarized(found))]
    lines += [f"\n![Held-out loss by tokens and by seconds]({PICTURE})"] if held_out(rows) else []
    return "\n".join(lines).rstrip() + "\n"


def held_out(rows: Iterable[Row]) -> list[Row]:
    """Records of trainings with a held-out loss."""
    return [row for row in rows if "val_loss" in row]


def summarized(rows: Sequence[Row]) -> Sequence[Row]:
    """Medians over the turns of each contender; the last held-out loss of each training; other rows as they are."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["part"], row.get("contender", "")), []).append(row)
    if any("turn" in row for row in rows):
        return [medians(found) for found in groups.values()]
    return [held_out(found)[-1] for found in groups.values() if held_out(found)] or rows


def medians(rows: Sequence[Row]) -> dict[str, Any]:
    """A row with the medians of a contender's turns, the quartiles of the hot step, and an error."""
    timed = [row for row in rows if "error" not in row]
    error = next((row["error"] for row in rows if "error" in row), None)
    columns = {key: median(row[key] for row in timed) for key in timed[0] if key.endswith(" ms")} if timed else {}
    hot = sorted(row["device ms"] for row in timed)
    quartiles = [hot[len(hot) // 4], hot[3 * len(hot) // 4]] if hot else []
    return {**rows[-1], **columns, "turn": len(hot), "quartiles": quartiles, "error": error}


def table(rows: Iterable[Row]) -> str:
    """Markdown table with a column for each key that has a value."""
    cells = [{key: shown(value) for key, value in row.items() if key not in HIDDEN} for row in rows][:MOST_ROWS]
    keys = dict.fromkeys(key for row in cells for key, cell in row.items() if cell)
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if value is None or isinstance(value, (str, bool, dict)):
        return "" if value is None else str(value).replace("|", "/").replace("\n", " ")
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Picture of the held-out loss of each training, by tokens and by seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for part in dict.fromkeys(row["part"] for row in rows):
        held = held_out(row for row in rows if row["part"] == part)
        for axis, x in zip(axes, ("tokens", "seconds"), strict=True):
            axis.plot([row[x] for row in held], [row["val_loss"] for row in held], label=part)
            axis.set_xlabel(x)
    axes[0].set_ylabel("held-out loss, nats a token")
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=110)


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
