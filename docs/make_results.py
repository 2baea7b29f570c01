"""Writes docs/results/plan.md from the JSON files of benchmarks/plan_scale.py in docs/results/, and a table of host.md.

The table of host.md has the counts of `benchmarks/count_launches.py` in launches.jsonl beside the modelled steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_muon.planner.machine import MACHINES

FOLDER = Path(__file__).parent / "results"
PAGE, HOST, LAUNCHES = FOLDER / "plan.md", FOLDER / "host.md", FOLDER / "launches.jsonl"
BEGIN, END = "<!-- launches: written by docs/make_results.py -->\n", "<!-- end of launches -->\n"
LISTS = 13
"""Lists that have a piece in a step, so that a tensor in a list costs the host this share of a piece."""
LAUNCH_US = 1e6 * MACHINES["h200x8"].host
ENTRY_US = 1e6 * MACHINES["h200x8"].host_piece / LISTS
KEYS = ("model", "ranks", "expert_parallel", "overlap", "replicas")
HEAD = """# Plans of published models: modelled steps

`docs/make_results.py` generates this page from `plan_*.json`. All times are modelled for `h100x8`, at the rates of each
section's commit: nodes of 8 GPUs, and 45 GB/s per GPU between nodes. Times are milliseconds of the last rank. Steps of
one H200 took 0.99 to 2.71 times the time that was modelled with rates fitted to it. The rates and their sources are in
`titan_muon/planner/machine.py`.

- **step**: Newton-Schulz + passes over memory + waits, if the host is ahead of the device.
- **least, link**: the least Newton-Schulz (the mean over ranks, or the largest matrix), and the busiest link.
- **whole**: a lower bound for plans with each matrix whole on one rank (`benchmarks/bounds.py`).
- **exposed**: the step minus the same step with links that take no time.
- **host**: time in which the host launches the step. A clock shows this time where it is longer than the step.
"""
HOST_COLUMNS = (
    "model",
    "ranks",
    "overlap",
    "replicas",
    "commit",
    "rank",
    "launches",
    "tensors in lists",
    "host ms",
    "step ms",
    "host / step",
)
COLUMNS = (
    "model",
    "ranks",
    "EP",
    "step = Newton-Schulz + passes + waits",
    "least, link",
    "step / whole",
    "exposed",
    "hidden",
    "host",
    "calls",
    "sent MiB",
    "buffers + workspace GiB",
)


def row(n: dict[str, Any]) -> str:
    """A line of the table."""
    cells = (
        n["model"],
        n["ranks"],
        n["expert_parallel"],
        f"{n['step_ms']:,.1f} = {n['newton_schulz_ms']:,.1f} + {n['passes_ms']:,.1f} + {n['waits_ms']:,.1f}",
        f"{n['least_ms']:,.1f}, {n['link_ms']:,.1f}",
        f"{n['step_ms'] / n['whole_ms']:.2f}",
        f"{n['exposed_ms']:,.1f}",
        f"{n['hidden_ms']:,.1f}",
        f"{n['host_ms']:,.1f}" + (" (longer than the step)" if n["host_ms"] > n["step_ms"] else ""),
        n["collectives"],
        f"{n['sent_mib_max']:,.0f}",
        f"{n['buffers_gib']:.2f} + {n['work_gib']:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def written() -> str:
    """The page."""
    parts = [HEAD]
    for file in sorted(FOLDER.glob("plan_*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"## {file.stem.removeprefix('plan_').replace('_', ', ')}\n")
        parts.append(
            f"`{document['command']}`, {document['date']}, commit {document['commit']}, {document['machine']}.\n"
        )
        parts.append(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        parts.append("\n".join(map(row, document["rows"])) + "\n")
    return "\n".join(parts)


def launches() -> str:
    """Launches and list entries of each counted row, and the host's time beside the modelled step."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("plan_*.json"))]
    steps = {tuple(n[key] for key in KEYS): n["step_ms"] for document in documents for n in document["rows"]}
    lines = [f"| {' | '.join(HOST_COLUMNS)} |", "|---|" + "---:|" * (len(HOST_COLUMNS) - 1)]
    for line in LAUNCHES.read_text(encoding="utf-8").splitlines():
        count = json.loads(line)
        row, host = count["row"], (LAUNCH_US * count["launches"] + ENTRY_US * count["entries"]) / 1e3
        step = steps[tuple(row[key] for key in KEYS)]
        counts = f"{count['commit']} | {count['rank']} | {count['launches']:,} | {count['entries']:,}"
        numbers = f"{counts} | {host:.1f} | {step:,.1f} | {host / step:.2f}"
        layout = f"{row['replicas']}"
        lines.append(f"| {row['model']} | {row['ranks']:,} | {row['overlap']} | {layout} | {numbers} |")
    return "\n".join(lines) + "\n"


def with_launches(page: str) -> str:
    """The page of the host's time with a new table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + launches() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
    HOST.write_text(with_launches(HOST.read_text(encoding="utf-8")), encoding="utf-8")
