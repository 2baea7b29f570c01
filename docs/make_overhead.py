"""Writes docs/results/overhead.md: Muon's modelled overhead beside published figures.

`python docs/make_overhead.py` plans every case (minutes) and writes overhead.json and the page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "results" / "overhead.md"
FIGURES = PAGE.with_suffix(".json")
HEAD = """# Muon's overhead beside published figures

`docs/make_overhead.py` generates this page. **theirs**: published by the source, most of them measured. **modelled**:
by a dry run of the nearest recipe here, never measured. A clock may show 0.9 to 2.8 times a modelled time. Machines and
rates are in `titan_muon/planner/machine.py`. The cases differ in precision, overlap and layout: compare sizes, not
digits.

- **Muon**: the step of Muon and of AdamW for the remaining parameters. **AdamW**: of AdamW for all parameters.
- **one pass**: the overhead over AdamW in a step without gradient accumulation, as most sources measure.
- **budget**: the overhead over AdamW in a step of the recipe, 4.19 M tokens.
- **at most 1 %**: the tokens of a step from which the overhead is at most 1 %.

An overhead depends on the tokens of a rank in a step: ten times the tokens give a tenth of the percentage. A dry run
prints the same figures for any recipe.
"""
COLUMNS = ("their case", "theirs", "source", "modelled case", "Muon, AdamW", "one pass", "budget", "at most 1 %")


@dataclass(frozen=True)
class Case:
    """A published figure, and the nearest dry run."""

    case: str
    theirs: str
    source: str
    recipe: str
    world: int
    machine: str
    words: tuple[str, ...] = ()


def experts(degree: int) -> tuple[str, ...]:
    """Overrides of a recipe's layout for experts over `degree` ranks."""
    plain = {"expert_parallel_degree": degree, "data_parallel_replicate_degree": 1, "tensor_parallel_degree": 1}
    layout = [f"--parallelism.{key}={value}" for key, value in plain.items()]
    passes = ("--training.local_batch_size=1", "--activation_checkpoint.mode=selective")
    return (*layout, *passes, "--parallelism.fsdp_reshard_after_forward=default")


NVIDIA = "NVIDIA blog, 2026-04-22"
DMUON = "dmuon, arXiv:2606.27153"
CASES = (
    Case(
        "Kimi K2, 256 GB300, PP 4, EP 64, MXFP8",
        "1,051 to 1,029 TFLOP/s with Muon, 2.1 % less",
        NVIDIA,
        "kimi_k2_muon",
        256,
        "gb300x72",
        experts(64),
    ),
    Case(
        "Qwen3-30B-A3B, 8 GB300, EP 8, MXFP8",
        "713 to 686 TFLOP/s with Muon, 3.8 % less",
        NVIDIA,
        "qwen3_30b_a3b_muon",
        8,
        "gb300x72",
        experts(8),
    ),
    Case(
        "Qwen3.5, 128 GPUs",
        "optimizer step of 783 ms, then 232 to 236 ms",
        "InternLM/xtuner#1716",
        "qwen3_30b_a3b_muon",
        128,
        "h100x8",
        experts(8),
    ),
    Case(
        "vision-language models, 16 nodes", "1.7 to 3.4 % over AdamW", DMUON, "qwen3_8b_muon", 128, "h100x8", experts(1)
    ),
    Case(
        "Qwen3 up to 32B, 256 GPUs",
        "optimizer step 5.8 times faster, training 1.57 times",
        "Canzona, arXiv:2602.06079",
        "qwen3_8b_muon",
        256,
        "h100x8",
        experts(1),
    ),
)


def planned(case: Case) -> dict[str, Any]:
    """Figures of a case's dry run, in milliseconds and tokens."""
    import models  # noqa: F401 (registers the families)
    from titan_muon.trainer.torchtitan import compat

    compat.install()
    from titan_muon.trainer.dry_run.stages import dry_run
    from titan_muon.trainer.recipe import load

    recipe = load(ROOT / "configs" / f"{case.recipe}.toml", ["--machine.name", case.machine, *case.words])
    verdict = max((part.verdict for part in dry_run(recipe, case.world)), key=lambda verdict: verdict.optimizers)
    one_pass = verdict.training.tokens // verdict.training.passes
    return {
        "muon_ms": 1e3 * verdict.optimizers,
        "adamw_ms": 1e3 * verdict.adamw,
        "pass_tokens": one_pass,
        "pass_percent": 100 * verdict.overhead_in_one_pass,
        "budget_percent": 100 * verdict.overhead,
        "percent_tokens": one_pass * verdict.passes_below_one_percent,
        "fits": verdict.fits,
    }


def row(case: Case, figures: dict[str, Any]) -> str:
    """A line of the table."""
    degree = case.words[0].partition("=")[2]
    layout = f"{case.machine} @ {case.world}" + (f", EP {degree}" if degree != "1" else "")
    cells = (
        case.case,
        case.theirs,
        case.source,
        f"`{case.recipe}`, {layout}" + ("" if figures["fits"] else " (exceeds the memory)"),
        f"{figures['muon_ms']:,.1f}, {figures['adamw_ms']:,.1f} ms",
        f"{figures['pass_percent']:.2g} % of {figures['pass_tokens']:,} tokens",
        f"{figures['budget_percent']:.2g} %",
        f"from {figures['percent_tokens']:,} tokens",
    )
    return f"| {' | '.join(cells)} |"


def written() -> str:
    """The page, from overhead.json."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    return "\n".join([HEAD, head, *map(row, CASES, figures)]) + "\n"


if __name__ == "__main__":
    FIGURES.write_text(json.dumps([planned(case) for case in CASES], indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(), encoding="utf-8")
