"""`--dry-run`: print the recipe, the assignment, the plan and memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP

from titan_muon.assignment.table import parameter_table
from titan_muon.plan import Summary, summarize
from titan_muon.plan.cost.timeline import Timeline, timeline
from titan_muon.plan.owned.ownership import OwnedTotals
from titan_muon.planning import planning_machine
from titan_muon.titan.assign.explain import (
    optimizer_lines,
    owned_step_lines,
    owner_lines,
    owner_loads,
    peer_lines,
    pipeline_line,
    plan_lines,
    weight_lines,
)
from titan_muon.titan.dry_run.memory import Memory, memory_per_rank
from titan_muon.titan.dry_run.meta_model import MetaModel, build_meta_model, smallest_world, this_device
from titan_muon.titan.model.qk_clip import qk_clip_lines
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml
from titan_muon.titan.recipe.degrees import batch_problem

KINDS = {"cuda": "GPUs (--device cpu plans for CPUs)", "cpu": "CPUs (--device cuda plans for GPUs)"}


def report(recipe: Recipe, world_size: int | None, *, full: bool, json: str | None, device: str | None = None) -> None:
    """Print the plan of training on `world_size` ranks, by default the smallest world of the degrees.

    `device`: type of device, by default GPUs with a `world_size`, otherwise this machine's. `full`: list every
    parameter instead of a line for all layers. `json`: file for the numbers. Raises RecipeError like training.
    """
    world = smallest_world(recipe) if world_size is None else world_size
    # A user who sets world_size plans a cluster, mostly on a laptop without its GPUs.
    kind = device if device is not None else this_device() if world_size is None else "cuda"
    stages = range(recipe.parallelism.pipeline_parallel_degree)
    parts = [_stage_report(build_meta_model(recipe, world, kind, stage=stage), recipe, kind) for stage in stages]
    # Compute everything before printing, so that a refused recipe shows only its error.
    print(to_toml(recipe))
    for part in parts:
        print(_headed(part, parameter_table(part.meta.assigned, part.meta.parameters, part.meta.plan, full=full)))
    counts = optimizer_lines(parts[0].meta.whole, recipe.muon.split, world)
    dtypes = {parameter.dtype for part in parts for parameter in part.meta.parameters.values()}
    weights = weight_lines(parts[0].meta.whole, dtypes, recipe.muon.rounding)
    clips = qk_clip_lines(recipe.qk_clip, parts[0].meta.logit_bytes, world)
    print("\n".join(["", *counts, *weights, *clips, f"planned for {KINDS.get(kind, kind)}"]))
    for part in parts:
        owned = owned_step_lines(part.meta.plan, part.meta.parameters, skips=recipe.muon.missing_grad == "skip")
        gathered = TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize
        reduced = TORCH_DTYPE_MAP[recipe.training.mixed_precision_reduce].itemsize
        peers = peer_lines(part.meta.parameters, gathered, reduced)
        plan = plan_lines(part.meta.plan, part.summary, part.timeline)
        lines = [*plan, *owned, *peers, "", *_memory_lines(part.memory)]
        owners = ["", *owner_lines(part.loads, full=full)] if part.loads else []
        print("\n" + _headed(part, "\n".join([*lines, *owners])))
    # Last, because the plan is valid and only training would be refused.
    problem = batch_problem(recipe, world)
    if problem is not None:
        print(f"\nwarning: training would be refused: {problem}")
    if json is not None:
        _write(Path(json), parts)


@dataclass(frozen=True)
class StageReport:
    """The model, or a pipeline rank's part, with the cost of the step and memory."""

    meta: MetaModel
    summary: Summary | None
    timeline: Timeline | None
    loads: Mapping[int, OwnedTotals]
    memory: Memory


def _stage_report(meta: MetaModel, recipe: Recipe, kind: str) -> StageReport:
    summary = None if meta.plan is None else summarize(meta.plan)
    machine = planning_machine(recipe.machine, kind)
    times = None if meta.plan is None else timeline(meta.plan, machine, overlap=recipe.muon.overlap)
    loads = owner_loads(meta.parameters, summary, meta.ranks)
    return StageReport(meta, summary, times, loads, memory_per_rank(meta, summary, loads, recipe, kind))


def _headed(part: StageReport, text: str) -> str:
    meta = part.meta
    if len(meta.ranks) == meta.world_size:
        return text
    return f"{pipeline_line(meta.ranks, meta.world_size, meta.assigned)}\n{text}"


def _memory_lines(memory: Memory) -> Iterable[str]:
    yield "memory per rank, without activations"
    for name, size in memory.sizes.items():
        yield f"  {name.replace('_', ' '):<18}{size / 2**20:>12,.1f} MiB"
    for name, size in memory.host_sizes.items():
        if size > 0:
            yield f"  {name.replace('_', ': '):<18}{size / 2**20:>12,.1f} MiB"
    for name in memory.uncounted:
        yield f"  the states of {name} are not counted: only the package that registered it knows their size"


def _write(path: Path, parts: Sequence[StageReport]) -> None:
    stages = [_document(part) for part in parts]
    world = parts[0].meta.world_size
    document = stages[0] if len(stages) == 1 else {"world_size": world, "pipeline_ranks": stages}
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name a file in a folder that exists"
        raise RecipeError(f"--json {path}: {problem}") from error
    print(f"\nwrote {path}")


def _document(part: StageReport) -> dict[str, object]:
    return {
        "world_size": part.meta.world_size,
        "parameters": [asdict(assignment) for assignment in part.meta.assigned],
        "memory": {
            **part.memory.sizes,
            **part.memory.host_sizes,
            "uncounted_optimizers": part.memory.uncounted,
        },
        "owners": [{"rank": rank, **asdict(load)} for rank, load in part.loads.items()],
        **({} if part.summary is None else asdict(part.summary)),
    }
