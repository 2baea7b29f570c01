"""Report of a run: all results in a JSON file, a page with pictures, and both in an archive."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import Environment
from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import Outcome, Result, read, write_whole

STYLE = (
    "body{font:15px sans-serif;max-width:70em;margin:2em auto}td,th{padding:0 .8em;text-align:left}pre{overflow:auto}"
)
FIGURES = 4
"""Significant digits of a number in a table."""


def read_json(file: Path) -> tuple[Any, str]:
    """JSON of a file, and the fault; both empty without a file."""
    if not file.exists():
        return None, ""
    try:
        return json.loads(file.read_text(encoding="utf-8")), ""
    except ValueError as error:
        return None, f"{file} is not JSON: {error}"


def write_report(parts: Sequence[Part], environment: Environment, folder: Path) -> Path:
    """Write report.json, report.html and report.zip of a folder's results. Returns the archive."""
    kept = [(part, read(part.name, folder)) for part in parts]
    # A result of another GPU or commit stays in its file until the part runs again, and is not reported.
    results = [(part, result if result is not None and holds(result, environment) else None) for part, result in kept]
    figures = {part.name: None if result is None else asdict(result) for part, result in results}
    document = {"environment": asdict(environment), "parts": figures}
    written = {"report.json": json.dumps(document, indent=1) + "\n", "report.html": page(results, environment)}
    for name, text in written.items():
        write_whole(folder / name, text)
    archive = folder / "report.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in written.items():
            file.writestr(name, text)
    return archive


def holds(result: Result, environment: Environment) -> bool:
    """Whether a result belongs to this environment, as far as known."""
    return result.environment == environment or result.environment.same(environment)


def page(results: Sequence[tuple[Part, Result | None]], environment: Environment) -> str:
    """Self-contained HTML page."""
    gpus = ", ".join(environment.gpus) if environment.gpus else "No GPU: rehearsed on fake tensors and the CPU only"
    facts = (
        f"torch {environment.torch}, CUDA {environment.cuda}, driver {environment.driver}, commit {environment.commit}"
    )
    lines = [f"<!doctype html><meta charset=utf-8><title>Titan Muon on GPUs</title><style>{STYLE}</style>"]
    lines += ["<h1>Titan Muon on GPUs</h1>", f"<p>{html.escape(gpus)}<br>{html.escape(facts)}</p>", overview(results)]
    lines += [section(part, result) for part, result in results]
    return "\n".join(lines) + "\n"


def overview(results: Sequence[tuple[Part, Result | None]]) -> str:
    """A table with a line for each part."""
    rows = []
    for part, result in results:
        outcome = "not run yet" if result is None else f"{result.outcome} {result.reason}"
        duration = "" if result is None else f"{result.seconds:.0f}"
        rows.append({"part": part.name, "outcome": outcome, "s": duration, "shows": part.shows})
    return table(rows)


def section(part: Part, result: Result | None) -> str:
    """A part's figures as table and picture, and the log of a failure."""
    head = f"<h2>{html.escape(part.name)}</h2>\n<p>{html.escape(part.shows)}.</p>"
    if result is None:
        return f"{head}\n<p>Not run yet.</p>"
    if result.outcome is not Outcome.PASSED:
        head += f"\n<p><b>{result.outcome}</b>: {html.escape(result.reason)}</p><pre>{html.escape(result.log)}</pre>"
    figures = result.figures if isinstance(result.figures, dict) else {}
    picture = draw(figures)
    shown = f'<img alt="{part.name}" src="data:image/png;base64,{picture}">' if picture else ""
    facts = {key: value for key, value in figures.items() if key not in ("rows", "runs", "checks")}
    return "\n".join([head, shown, table(rows_of(figures)), f"<pre>{html.escape(json.dumps(facts, indent=1))}</pre>"])


def rows_of(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of a part's figures of any kind."""
    if "runs" in figures:
        runs = figures["runs"].items()
        return [{"run": n, "last loss": last(r), **{k: v for k, v in r.items() if k != "losses"}} for n, r in runs]
    return list(figures.get("rows", figures.get("checks", [])))


def last(run: Mapping[str, Any]) -> float | str:
    """Last loss of a run, if any."""
    losses = list(run["losses"].values())
    return losses[-1] if losses else ""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """HTML table; a column for each key, nested keys by their last name."""
    flat = [flattened(row) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    head = "".join(f"<th>{html.escape(key)}</th>" for key in keys)
    body = ["".join(f"<td>{html.escape(shown(row.get(key, '')))}</td>" for key in keys) for row in flat]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>" if rows else ""


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without nested tables."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells.update(flattened(value) if isinstance(value, dict) else {key: value})
    return cells


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return (
        f"{value:.{FIGURES}g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def draw(figures: Mapping[str, Any]) -> str:
    """Picture of a part's figures as PNG in base64; empty without figures or matplotlib."""
    kind = next((name for name, fits in FITS.items() if fits(figures)), None)
    if kind is None:
        return ""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    DRAWN[kind](axes, figures)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def draw_losses(axes: Any, figures: Mapping[str, Any]) -> None:
    """Loss by step, a line per run."""
    for name, run in figures["runs"].items():
        axes.plot([int(step) for step in run["losses"]], list(run["losses"].values()), label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


def draw_links(axes: Any, figures: Mapping[str, Any]) -> None:
    """Bandwidth by size, a line per collective."""
    for name in dict.fromkeys(row["collective"] for row in figures["rows"]):
        mine = [row for row in figures["rows"] if row["collective"] == name]
        axes.loglog([row["bytes"] for row in mine], [row["gb_s"] for row in mine], marker="o", label=name)
    axes.set(xlabel="bytes", ylabel="GB/s that a rank sends")
    axes.legend()


def draw_bars(axes: Any, figures: Mapping[str, Any]) -> None:
    """Milliseconds, a bar per row."""
    key = "ms" if "ms" in figures["rows"][0] else "step_ms"
    names = [" ".join(str(row[k]) for k in ("shape", "name") if k in row) for row in figures["rows"]]
    axes.barh(range(len(names)), [row[key] for row in figures["rows"]])
    axes.set_yticks(range(len(names)), names, fontsize=max(4, 9 - len(names) // 8))
    axes.invert_yaxis()
    axes.set(xlabel=key)


def draw_rates(axes: Any, figures: Mapping[str, Any]) -> None:
    """Share of the matmul rate by shape, a point per method."""
    shapes = list(dict.fromkeys(row["shape"] for row in figures["rows"]))
    for name in dict.fromkeys(row["name"] for row in figures["rows"]):
        mine = [row for row in figures["rows"] if row["name"] == name and math.isfinite(row["of_matmul"])]
        axes.plot([shapes.index(row["shape"]) for row in mine], [row["of_matmul"] for row in mine], "o", label=name)
    axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=7)
    axes.set(ylabel="of the matmul rate")
    axes.legend(fontsize=7)


def has_rows(figures: Mapping[str, Any], *keys: str) -> bool:
    """Whether there are rows with all of these keys."""
    rows: list[Mapping[str, Any]] = figures.get("rows", [])
    return bool(rows) and all(key in rows[0] for key in keys)


FITS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "losses": lambda figures: any(run["losses"] for run in figures.get("runs", {}).values()),
    "links": lambda figures: has_rows(figures, "collective"),
    "rates": lambda figures: has_rows(figures, "of_matmul"),
    "bars": lambda figures: has_rows(figures, "name") and bool({"ms", "step_ms"} & figures["rows"][0].keys()),
}
"""Picture by the keys of the figures; the first match decides."""
DRAWN: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "losses": draw_losses,
    "links": draw_links,
    "rates": draw_rates,
    "bars": draw_bars,
}
