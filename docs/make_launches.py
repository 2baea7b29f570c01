"""Writes the table of kernel launches in docs/rehearsal.md, counted on fake GPUs.

    .venv-newest/bin/python docs/make_launches.py

Needs the environment of `make newest`. `tests/unit/benchmarks/test_launches.py` fails where the page differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rehearsal.md"
BEGIN, END = "<!-- launches: written by docs/make_launches.py -->\n", "<!-- end of launches -->\n"
WORLD = 64
CASES: dict[str, tuple[str, ...]] = {
    "qwen3_8b": (),
    "qwen3_30b_a3b": ("--parallelism.expert_parallel_degree", "1"),
    "llama3_8b": ("--parallelism.tensor_parallel_degree", "8"),
}
"""Further words of the command line by recipe."""
KINDS = ("plain", "recipe", "skippable")


def counted(recipe: str) -> dict[str, int]:
    """Launches of Muon's step on rank 0, by kind of step. In another process, because meshes are per process."""
    command = [sys.executable, "-m", "benchmarks.rehearsal.launches", "--world-size", str(WORLD)]
    command += ["--config", str(ROOT / "configs" / f"{recipe}_muon.toml"), *CASES[recipe]]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{recipe}: {ended.stderr[-2000:]}")
    launches: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return launches


def row(recipe: str, launches: dict[str, int]) -> str:
    """A line of the table."""
    names = {"--parallelism.tensor_parallel_degree": "TP", "--parallelism.expert_parallel_degree": "EP"}
    layout = " ".join(names.get(word, word) for word in CASES[recipe]) or "as in the recipe"
    return f"| `{recipe}_muon` | {layout} | {' | '.join(f'{launches[kind]:,}' for kind in KINDS)} |\n"


def written_launches(page: str) -> dict[str, dict[str, int]]:
    """The launches in the page's table, by recipe and kind."""
    table = page.split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {
        cells[0].strip("`").removesuffix("_muon"): {
            kind: int(cell.replace(",", "")) for kind, cell in zip(KINDS, cells[2:], strict=True)
        }
        for cells in rows
    }


def written(page: str) -> str:
    """The page with a new table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    header = (
        f"| recipe | layout | Muon alone | in a recipe | a step that may be skipped |\n|---|---|{'---|' * len(KINDS)}\n"
    )
    return before + BEGIN + header + "".join(row(recipe, counted(recipe)) for recipe in CASES) + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
