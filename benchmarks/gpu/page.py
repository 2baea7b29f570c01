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
TITLES = {
    1: "Call 1: launches, and one rank of large worlds",
    2: "Call 2: contenders",
    3: "Call 3: exchange",
    4: "Call 4: training",
}
HIDDEN = ("call", "part", "source", "measured", "kernels", "log", "commands")
MOST_ROWS = 80


def page(rows: Sequence[Mapping[str, Any]], old: Mapping[str, Any]) -> str:
    """The page of measured rows and of the former figures."""
    lines = [HEAD] if rows else [HEAD, NOT_RUN]
    tables: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault((TITLES[row["call"]], row["part"], row.get("measured", "")), []).append(row)
    for title in TITLES.values():
        mine = {key: found for key, found in tables.items() if key[0] == title}
        lines += [f"\n## {title}\n"] if mine else []
        for (_, part, name), found in mine.items():
            lines += [f"\n### {part}{f': {name}' if name else ''}\n", table(summarized(found))]
            lines += [f"\n![Held-out loss by tokens and by seconds]({PICTURE})"] if held_out(found) else []
    lines += [OLD_HEAD]
    for name, result in old.items():
        figures = result["figures"] or {}
        former = figures.get("rows") or [{"run": run, **values} for run, values in figures.get("runs", {}).items()]
        lines += [f"\n## {name}\n", table(former) or f"{result['outcome']} {result['reason']}"]
    return "\n".join(lines).rstrip() + "\n"


def held_out(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records of trainings with a held-out loss."""
    return [row for row in rows if "val_loss" in row]


def summarized(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Medians over the turns of each contender; the last held-out loss of a training; other rows as they are."""
    if held := held_out(rows):
        return held[-1:]
    if not any("turn" in row for row in rows):
        return rows
    turns: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        turns.setdefault(row["contender"], []).append(row)
    return [medians(contender, found) for contender, found in turns.items()]


def medians(contender: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown table with a column for each key that has a value; nested keys by their own name."""
    flat = [{key: shown(value) for key, value in flattened(row).items() if key not in HIDDEN} for row in rows]
    keys = dict.fromkeys(key for row in flat[:MOST_ROWS] for key, cell in row.items() if cell)
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in flat[:MOST_ROWS])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if flat else ""


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
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


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
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
    (docs / PAGE).write_text(page(rows, json.loads((docs / OLD).read_text(encoding="utf-8"))), encoding="utf-8")
    if trainings := held_out(rows):
        draw(trainings, docs / PICTURE)
    print(f"{docs / PAGE}: {len(rows)} rows of the calls")
