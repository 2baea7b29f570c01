"""Writes the table of docs/memory.md: bytes per parameter of each combination of options, from the plan of a recipe.

    python docs/make_memory.py

`tests/unit/docs/test_docs.py` fails where the page and the dry run differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import models  # noqa: F401 (registers the families)
from titan_muon.trainer.torchtitan import compat

compat.install()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from titan_muon import Muon  # noqa: E402
from titan_muon.adamw import AdamW  # noqa: E402
from titan_muon.forecast.memory import Memory, memory_per_rank  # noqa: E402
from titan_muon.planner.summary import summarize  # noqa: E402
from titan_muon.trainer.dry_run.meta_model import MetaModel, build_meta_model  # noqa: E402
from titan_muon.trainer.recipe import load  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- table: written by docs/make_memory.py -->", "<!-- end of table -->"
RECIPE, WORLD = "qwen3_8b_muon", 8
CPU_OFFLOAD = "training.enable_cpu_offload"
"""Also moves parameters and gradients to the host."""
OPTIONS = {
    "optimizer.offload": ("none", "state", CPU_OFFLOAD),
    "muon.state_dtype": ("float32", "bfloat16", "int8"),
    "adamw.state_dtype": ("parameter", "bfloat16"),
}
HEADER = (
    *(f"`{key}`" for key in OPTIONS),
    "states between steps",
    "states in a step",
    "gradients once packed",
    "with `muon.expert.release_grads`",
    "device at most",
    "host",
)


def optimizers(offload: str, momentum: str, averages: str) -> dict[str, torch.optim.Optimizer]:
    """Muon and AdamW with a combination of options."""
    matrix = nn.Parameter(torch.zeros(16, 16))
    kept: Any = "parameters" if offload == CPU_OFFLOAD else offload
    muon = Muon([("matrix", matrix)], state_dtype=momentum, offload=kept)
    options: Any = {"state_dtype": averages, "offload": kept, "betas": (0.9, 0.95)}
    return {"muon": muon, "adamw": AdamW([matrix], **options)}


def row(meta: MetaModel, memory: Memory) -> Iterator[float]:
    """Bytes per parameter on a rank."""
    local = {name: parameter.to_local() for name, parameter in meta.parameters.items()}
    elements = sum(tensor.numel() for tensor in local.values())
    gradients = [0, 0]
    if memory.host_parameters == 0:
        gradients = [sum(local[a.fqn].nbytes for a in meta.assigned if a.optimizer != o) for o in ("", "muon")]
    between = memory.optimizer_states if memory.host_states == 0 else 0
    sizes = (between, memory.optimizer_states, *gradients, memory.sizes["total"], sum(memory.host_sizes.values()))
    return (size / elements for size in sizes)


def table() -> str:
    """The table."""
    # The placement of states and their dtype do not change the plan.
    meta = build_meta_model(load(ROOT / "configs" / f"{RECIPE}.toml"), WORLD, "cuda")
    assert meta.plan is not None, f"Muon takes matrices of {RECIPE}"
    summary = summarize(meta.plan)
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    for options in product(*OPTIONS.values()):
        if options[0] != "none" and options[1] == "int8":
            # Refused together.
            continue
        variant = replace(meta.optimizers, optimizers=optimizers(*options))
        memory = memory_per_rank(meta.parameters, variant, meta.plan, summary, {}, meta.device)
        cells = [f"`{str(option).lower()}`" for option in options]
        cells += [f"{size:.2f}" for size in row(meta, memory)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the current table. Raises ValueError if the page has no place for the table."""
    before, opening, rest = page.partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not (opening and closing):
        raise ValueError(f"{PAGE}: needs the lines {BEGIN!r} and {END!r}, between which the table is written")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
