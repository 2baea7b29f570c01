"""`--dry-run`: print the recipe, the assignment, the plan and memory. `--compare`: a table of alternative recipes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from titan_muon.assignment.rules import Assignment
from titan_muon.assignment.table import decay_lines, parameter_table
from titan_muon.forecast import lines
from titan_muon.trainer.checks.start import data_problems
from titan_muon.trainer.dry_run.verdict import StageReport, dry_run, is_for_this_machine, verdict_lines
from titan_muon.trainer.model.pipeline import pipeline_line
from titan_muon.trainer.model.qk_clip import qk_clip_lines
from titan_muon.trainer.recipe import RecipeError, to_toml
from titan_muon.trainer.recipe.command_line import Alternative, Command
from titan_muon.trainer.recipe.toml import without_password

KINDS = {"cuda": "GPUs (--device cpu plans for CPUs)", "cpu": "CPUs (--device cuda plans for GPUs)"}
COLUMNS = ("", "fits", "peak GiB", "Muon ms", "AdamW ms", "over AdamW", "sent in Muon's step MiB", "idle ranks")


def report(command: Command) -> None:
    """Print the plan of training, by default on the smallest world of the degrees.

    Raises RecipeError like training, or for a file that cannot be written.
    """
    # A refused recipe shows only its error.
    recipe, full, parts = command.recipe, command.full, dry_run(command.recipe, command.world_size, command.device)
    first, kind = parts[0].meta, parts[0].meta.device
    if command.verbose:
        print(without_password(to_toml(recipe)))
    _print(parts, lambda part: [parameter_table(part.meta.assigned, part.meta.parameters, part.meta.plan, full=full)])
    dtypes = {parameter.dtype for part in parts for parameter in part.meta.parameters.values()}
    whole = first.optimizers.whole
    counts = [
        *lines.optimizer_lines(whole, recipe.muon.split, first.world_size),
        *decay_lines(*(part.meta.optimizers.groups for part in parts)),
        *weight_lines(whole, dtypes, recipe.muon.expert.rounding),
        *qk_clip_lines(recipe.qk_clip, first.logit_bytes, first.world_size),
        f"planned for {KINDS.get(kind, kind)}",
    ]
    print("\n".join(["", *counts]))
    _print(parts, lambda p: [*lines.step_lines(p.meta, p.estimate), *lines.memory_lines(p.estimate, full=full)])
    _print(parts, lambda part: verdict_lines(part.verdict, part.meta, part.estimate.machine))
    for problem in () if is_for_this_machine(command.world_size, command.device) else data_problems(recipe):
        print(f"\nwarning: training on this machine would be refused: {problem}")
    if command.json is not None:
        stages = [_document(part) for part in parts]
        document = stages[0] if len(stages) == 1 else {"world_size": first.world_size, "pipeline_ranks": stages}
        _write(Path(command.json), json.dumps(document, indent=1) + "\n")


def weight_lines(assigned: Sequence[Assignment], dtypes: Iterable[torch.dtype], rounding: str) -> Iterable[str]:
    """Effect of rounding on bfloat16 weights without a float32 copy, by optimizer."""
    if torch.bfloat16 not in dtypes:
        return
    yield 'weights: bfloat16, and no float32 copy of them; training.dtype = "float32" would keep one'
    lost = "rounds to the nearest, and loses updates of less than 0.2 % of a weight"
    for optimizer in sorted({a.optimizer for a in assigned}):
        stochastic = optimizer == "muon" and rounding == "stochastic"
        yield f"  {optimizer} {'rounds stochastically, and keeps small updates on average' if stochastic else lost}"


def _print(parts: Sequence[StageReport], text: Callable[[StageReport], Iterable[str]]) -> None:
    """Print the lines of each pipeline stage, below a heading if there are several."""
    for part in parts:
        meta = part.meta
        heading = [pipeline_line(meta.ranks, meta.world_size, meta.assigned)] if len(parts) > 1 else []
        print("\n".join(["", *heading, *text(part)]))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name a file in a folder that exists"
        raise RecipeError(f"--json {path}: {problem}") from error
    print(f"\nwrote {path}")


def _document(part: StageReport) -> dict[str, object]:
    verdict, estimate, memory = part.verdict, part.estimate, part.estimate.memory
    return {
        "world_size": part.meta.world_size,
        "parameters": [asdict(assignment) for assignment in part.meta.assigned],
        "memory": memory.sizes | memory.host_sizes | {"uncounted_optimizers": memory.uncounted},
        "verdict": {
            "machine": estimate.machine.name,
            "fits": verdict.fits,
            "peak_bytes": verdict.peak,
            "capacity_bytes": verdict.capacity,
            "modelled_muon_seconds": verdict.optimizers,
            "modelled_adamw_seconds": verdict.adamw,
            "overhead_over_adamw": verdict.overhead,
            "training": asdict(verdict.training),
        },
        "owners": [{"rank": rank, **asdict(load)} for rank, load in estimate.loads.items()],
        **({} if estimate.summary is None else asdict(estimate.summary)),
    }


def compare(alternatives: Sequence[Alternative], world_size: int | None, device: str | None) -> Iterator[str]:
    """A table of modelled times, then a line for each refused alternative."""
    rows: list[tuple[bool, float, list[str]]] = []
    refused: list[str] = []
    machine = ""
    for alternative in alternatives:
        try:
            parts = dry_run(alternative.load(), world_size, device)
        except RecipeError as error:
            refused.append(f"  {alternative.name}: refused: {error}")
            continue
        machine = parts[0].estimate.machine.name
        fits, seconds = all(part.verdict.fits for part in parts), max(part.verdict.optimizers for part in parts)
        rows.append((not fits, seconds, _row(alternative.name, parts)))
    yield f"alternatives on {machine}, modelled; the shortest step of the optimizers that fits first"
    yield from table(COLUMNS, [row for *_, row in sorted(rows, key=lambda item: item[:2])])
    yield from refused


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column to the left, the others to the right. None without rows."""
    cells = [columns, *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers in cells:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])


def _row(name: str, parts: Sequence[StageReport]) -> list[str]:
    slowest = max((part.verdict for part in parts), key=lambda verdict: verdict.optimizers)
    summaries = [summary for part in parts if (summary := part.estimate.summary) is not None]
    sent = max((summary.bytes_sent_max for summary in summaries), default=0)
    idle = sum(cost.matrices == 0 for summary in summaries for cost in summary.ranks)
    return [
        name,
        "yes" if all(part.verdict.fits for part in parts) else "no",
        f"{max(part.verdict.peak for part in parts) / 2**30:,.1f}",
        f"{1e3 * slowest.optimizers:,.2f}",
        f"{1e3 * slowest.adamw:,.2f}",
        f"{100 * slowest.overhead:+.2f} %",
        f"{sent / 2**20:,.1f}",
        f"{idle:,}",
    ]
