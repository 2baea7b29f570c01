"""Files of a run beside the results: page, archive, machine file and measured choices; and the page of the docs.

    python -m benchmarks.gpu.report build/gpu/results.json      # one file or several, of the same GPU

writes docs/results/gpu.json and gpu.md, and adds measured choices to titan_muon/plan/terms/measured.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import ROOT, Environment
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import FILE, Outcome, Result, read, write, write_whole

PAGE, ARCHIVE, MACHINE, MEASURED = "report.md", "results.tgz", "machine.json", "measured.json"
DOCS = ROOT / "docs/results"
SHIPPED = ROOT / "titan_muon/plan/terms/measured.json"
FIGURES = 4
"""Significant digits of a number in a table."""
MOST_ROWS = 80
"""Most rows of a table; the rest is in the JSON file."""
HEAD = """# Titan Muon on GPUs

`benchmarks/gpu/report.py` generates this page from the results of `make gpu`, see [gpu.md]({link}).
Rows named `model` are the planner's, and every other row is **{source}**.
"""
NOT_RUN = "No GPU has run the parts. Only the planner's times are known.\n"


def read_json(file: Path) -> tuple[Any, str]:
    """JSON of a file, and the fault; both empty without a file."""
    if not file.exists():
        return None, ""
    try:
        return json.loads(file.read_text(encoding="utf-8")), ""
    except ValueError as error:
        return None, f"{file.name} is not JSON: {error}"


def write_report(kept: Mapping[str, Result], environment: Environment, folder: Path, work: Path) -> None:
    """Write all files but the results. `work`: folder with logs and figures, for the archive."""
    # A result of another GPU or commit stays until the part runs again, and is not reported.
    results = {name: result for name, result in kept.items() if holds(result, environment)}
    write_whole(folder / PAGE, page(results))
    write_whole(folder / MACHINE, json.dumps(machine(results), indent=1) + "\n")
    write_whole(folder / MEASURED, json.dumps(choices(results), indent=1) + "\n")
    part = folder / f"{ARCHIVE}.{os.getpid()}"
    with tarfile.open(part, "w:gz") as archive:
        for file in (folder / FILE, folder / PAGE, *sorted(work.glob("*.log")), *sorted(work.glob("*.figures"))):
            archive.add(file, file.name)
    part.replace(folder / ARCHIVE)


def holds(result: Result, environment: Environment) -> bool:
    """Whether a result belongs to this environment, as far as known."""
    return result.environment == environment or result.environment.same(environment)


def machine(results: Mapping[str, Result]) -> dict[str, Any]:
    """The machine file for the planner; without rates until the part `links` has run."""
    result = results.get("links")
    rates = result.figures["machine"] if result is not None and result.figures else {}
    return {**rates, "source": "not run" if result is None else result.source}


def choices(results: Mapping[str, Result]) -> dict[str, Any]:
    """By GPU: the fastest kernels, whether `fused` is faster, and whether float16 is safe, as far as parts have run."""
    figures = {name: result.figures for name, result in results.items() if isinstance(result.figures, dict)}
    fused = [found["fused_is_faster"] for found in figures.values() if found.get("fused_is_faster") is not None]
    entry = {
        "kernels": figures.get("newton_schulz", {}).get("kernels"),
        "fused": all(fused) if fused else None,
        "float16": figures.get("float16", {}).get("is_safe"),
    }
    known = {key: value for key, value in entry.items() if value is not None}
    first = next(iter(results.values()), None)
    if first is None:
        return {}
    name = first.environment.gpus[0] if first.environment.gpus else "cpu"
    return {name: {"source": first.source, "torch": first.environment.torch, **known}}


def best_rates(figures: Any) -> dict[str, str]:
    """Learning rate with the lowest last loss, by optimizer, of the part `sweep`."""
    rows = [row for row in (figures or {}).get("rows", []) if row.get("loss") is not None]
    names = dict.fromkeys(row["optimizer"] for row in rows)
    best = {name: min((row for row in rows if row["optimizer"] == name), key=lambda row: row["loss"]) for name in names}
    return {name: f"{row['lr']:g}" for name, row in best.items()}


def page(results: Mapping[str, Result], link: str = "../../docs/gpu.md") -> str:
    """Markdown page of all parts."""
    ran = [result for result in results.values() if result.outcome is not Outcome.NOT_RUN]
    source = ", ".join(dict.fromkeys(result.source for result in ran)) or "not run"
    lines = [HEAD.format(source=source, link=link), facts(ran), overview(results)]
    for part in PARTS:
        result = results.get(part.name)
        if result is not None and isinstance(result.figures, dict):
            state = result.source if result.source == "measured" else f"rehearsed, except {part.unrehearsed}"
            state = "not run" if result.outcome is Outcome.NOT_RUN else state
            lines += [f"\n## {part.name}\n", f"{part.shows[0].upper()}{part.shows[1:]} ({state}).\n"]
            lines += [table(rows_of(result.figures)), *notes(result.figures)]
    return "\n".join(lines).rstrip() + "\n"


def facts(results: Sequence[Result]) -> str:
    """The environments of some results, a line each."""
    environments = dict.fromkeys(
        (", ".join(e.gpus) or "no GPU", e.torch, e.driver or "none", e.python, e.commit or "unknown")
        for e in (result.environment for result in results)
    )
    lines = [f"- {gpus}; torch {torch}; driver {d}; Python {p}; commit {c}" for gpus, torch, d, p, c in environments]
    return "\n".join(lines) + "\n" if lines else NOT_RUN


def overview(results: Mapping[str, Result]) -> str:
    """A table with a line for each part."""
    rows = []
    for part in PARTS:
        result = results.get(part.name)
        outcome = "not run" if result is None else f"{result.outcome} {result.reason}".strip()
        duration = 0.0 if result is None else result.seconds
        rows.append({"part": part.name, "call": part.call or "", "outcome": outcome, "s": f"{duration:.0f}"})
    return table(rows)


def rows_of(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of a part's figures of any kind."""
    if "runs" in figures:
        runs = figures["runs"].items()
        return [{"run": n, "last loss": last(r), **{k: v for k, v in r.items() if k != "losses"}} for n, r in runs]
    return list(figures.get("rows") or figures.get("checks", []))


def last(run: Mapping[str, Any]) -> float | str:
    """Last loss of a run, if any."""
    losses = list(run["losses"].values())
    return losses[-1] if losses else ""


def notes(figures: Mapping[str, Any]) -> list[str]:
    """Figures of a part that are no table, a line each."""
    plain = {k: v for k, v in figures.items() if k not in ("rows", "runs", "checks", "faults", "details")}
    flat = flattened(plain).items()
    lines = [f"- {key}: {shown(value)}" for key, value in flat if not isinstance(value, list) or len(value) < 9]
    return ["", *lines] if lines else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table; a column for each key, nested keys by their last name, without lists."""
    flat = [flattened(row) for row in rows[:MOST_ROWS]]
    keys = [k for k in dict.fromkeys(key for row in flat for key in row) if any(shown(row.get(k)) for row in flat)]
    lines = [keys, ["---"] * len(keys), *([shown(row.get(key)) for key in keys] for row in flat)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without nested tables."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells.update(flattened(value) if isinstance(value, dict) else {key: value})
    return cells


def shown(value: Any) -> str:
    """A cell."""
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value).replace("|", "/").replace("\n", " ")
    return f"{value:.{FIGURES}g}" if isinstance(value, float) else f"{value:,}"


def published(results: Iterable[Result]) -> dict[str, Result]:
    """Results for the docs: measured figures with the model's rows, and of a rehearsal the model's rows alone."""
    kept = {}
    for result in results:
        rows = [row for row in (result.figures or {}).get("rows", []) if row.get("source") == "model"]
        if result.source == "measured":
            kept[result.part] = replace(
                result, environment=replace(result.environment, executable=""), log="", command=()
            )
        elif rows:
            short = replace(result.environment, commit="", executable="")
            done = {"outcome": Outcome.NOT_RUN, "reason": "", "seconds": 0.0, "log": "", "command": ()}
            kept[result.part] = replace(result, environment=short, figures={"rows": rows}, **done)  # type: ignore[arg-type]
    return kept


def main(words: Sequence[str]) -> int:
    """Write the docs' page and data, and the shipped choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="results.json of one call or several")
    results = published(result for file in parser.parse_args(words).files for result in read(file).values())
    write(results.values(), DOCS)
    (DOCS / FILE).replace(DOCS / "gpu.json")
    write_whole(DOCS / "gpu.md", page(results, link="../gpu.md"))
    known = json.loads(SHIPPED.read_text(encoding="utf-8"))
    new = {name: entry for name, entry in choices(results).items() if entry["source"] == "measured"}
    write_whole(SHIPPED, json.dumps({**known, **new}, indent=1, sort_keys=True) + "\n")
    print(f"{DOCS / 'gpu.md'}: {len(results)} parts; {SHIPPED}: {', '.join(new) or 'nothing measured'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
