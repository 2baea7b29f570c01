"""Writes docs/results/gpu.md and its picture from rows of the four calls, and from the figures of 2026-11-27."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import ROOT, read_rows

DOCS = ROOT / "docs/results"
DATA, OLD, PAGE, PICTURE = "gpu_calls.jsonl", "gpu.json", "gpu.md", "gpu_loss.png"
HEAD = """# Figures of GPUs

`python -m benchmarks.gpu --page ROWS` writes this page from `gpu_calls.jsonl`, the rows of `make gpu`
([gpu.md](../gpu.md)), and from `gpu.json`, the figures of one H200 by a former version of the benchmarks.
[h200.md](h200.md) reads the latter.
"""
NOT_RUN = "\nNo GPU has run the four calls.\n"
OLD_HEAD = """
# Former figures

`gpu.json`: one H200 on 2026-11-27. `passes ms` of rows with `fused` miss kernels of Triton, and `host ms` of large
worlds include waits for a place in the launch queue. Rows named `model` are the planner's.
"""
TITLES = {1: "Launches, and one rank of large worlds", 2: "Contenders", 3: "Exchange and capture", 4: "Training"}
HIDDEN = ("call", "part", "source", "kernels", "log", "commands")
MOST_ROWS = 80


def page(rows: Sequence[Mapping[str, Any]], old: Mapping[str, Any]) -> str:
    """The page of measured rows and of the former figures."""
    lines = [HEAD] if rows else [HEAD, NOT_RUN]
    for call, title in TITLES.items():
        mine = [row for row in rows if row["call"] == call]
        if mine:
            lines += [f"\n## Call {call}: {title}\n"]
            lines += [f"- {facts(row)}" for row in mine if row["part"] == "environment"]
        for part in dict.fromkeys(row["part"] for row in mine if row["part"] != "environment"):
            found = [row for row in mine if row["part"] == part]
            for name in dict.fromkeys(row.get("measured", "") for row in found):
                some = summarized([row for row in found if row.get("measured", "") == name])
                lines += [f"\n### {part}{f': {name}' if name else ''}\n", table(some)]
        if call == 4 and mine:
            lines += [f"\n![Held-out loss by tokens and by seconds]({PICTURE})"]
    lines += [OLD_HEAD]
    for name, result in old.items():
        figures = result["figures"] or {}
        found = figures.get("rows") or [{"run": run, **values} for run, values in figures.get("runs", {}).items()]
        lines += [f"\n## {name}\n", table(found) or f"{result['outcome']} {result['reason']}"]
    return "\n".join(lines).rstrip() + "\n"


def facts(row: Mapping[str, Any]) -> str:
    """Date, machine, versions and commit in a line."""
    return ", ".join(f"{key} {value}" for key, value in flattened(row).items() if key not in HIDDEN)


def summarized(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the turns of each contender; the last record of a training; other rows as they are."""
    if any("turn" in row for row in rows):
        names = dict.fromkeys(row["contender"] for row in rows)
        return [medians(name, [row for row in rows if row["contender"] == name]) for name in names]
    if any("val_loss" in row for row in rows):
        held = [row for row in rows if "val_loss" in row]
        return [
            {**held[-1], **{key: row[key] for row in rows for key in ("tokens_per_second", "memory_gib") if key in row}}
        ]
    return [dict(row) for row in rows]


def medians(contender: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row with the medians of a contender's turns, the quartiles of the hot step, and its first error."""
    times = [key for row in rows for key in row if key.endswith(" ms")]
    columns = {key: median(row[key] for row in rows if key in row) for key in dict.fromkeys(times)}
    hot = sorted(row["device ms"] for row in rows if "device ms" in row)
    spread = {"quartiles": [hot[len(hot) // 4], hot[3 * len(hot) // 4]]} if hot else {}
    errors = [row["error"] for row in rows if "error" in row]
    return {"contender": contender, "turns": len(hot), **columns, **spread, **({"error": errors[0]} if errors else {})}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown table with a column for each key that has a value; nested keys by their own name."""
    flat = [{key: shown(value) for key, value in flattened(row).items() if key not in HIDDEN} for row in rows][
        :MOST_ROWS
    ]
    keys = [key for key in dict.fromkeys(key for row in flat for key in row) if any(row.get(key) for row in flat)]
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in flat)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if flat else ""


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without nested tables. `measured` is in the heading."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells.update(flattened(value) if isinstance(value, dict) else {} if key == "measured" else {key: value})
    return cells


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, list):
        return "" if len(value) > 8 else ", ".join(map(shown, value))
    if value is None or isinstance(value, (str, bool)):
        return "" if value is None else str(value).replace("|", "/").replace("\n", " ")
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Picture of the held-out loss of each training, by tokens and by seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for part in dict.fromkeys(row["part"] for row in rows):
        held = [row for row in rows if row["part"] == part and "val_loss" in row]
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
    (docs / PAGE).write_text(page(rows, json.loads((docs / OLD).read_text(encoding="utf-8"))), encoding="utf-8")
    trainings = [row for row in rows if row["call"] == 4 and "val_loss" in row]
    if trainings:
        draw(trainings, docs / PICTURE)
    print(f"{docs / PAGE}: {len(rows)} rows of the calls")
