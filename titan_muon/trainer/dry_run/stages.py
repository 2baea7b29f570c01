"""The dry run of a recipe for each pipeline stage: plan, times, memory and verdict."""

from __future__ import annotations

from dataclasses import dataclass

from titan_muon.forecast.model import Estimate, estimate_of
from titan_muon.trainer.checks.machine import check_machine
from titan_muon.trainer.device import this_device
from titan_muon.trainer.dry_run.meta_model import MetaModel, build_meta_model, smallest_world
from titan_muon.trainer.dry_run.verdict import Verdict, verdict_of
from titan_muon.trainer.recipe import Recipe, check_degrees


@dataclass(frozen=True)
class StageReport:
    """Estimate for the model or a pipeline stage."""

    meta: MetaModel
    estimate: Estimate
    verdict: Verdict


def dry_run(recipe: Recipe, world_size: int | None, device: str | None = None) -> list[StageReport]:
    """A report for each pipeline stage. Raises RecipeError like training."""
    world = smallest_world(recipe) if world_size is None else world_size
    # A world size means a cluster of GPUs, mostly planned on a laptop without GPUs.
    kind = device if device is not None else this_device() if world_size is None else "cuda"
    check_degrees(recipe, world)
    if is_for_this_machine(world_size, device):
        check_machine(recipe)
    stages = range(recipe.parallelism.pipeline_parallel_degree)
    return [_report(build_meta_model(recipe, world, kind, stage=stage), recipe) for stage in stages]


def is_for_this_machine(world_size: int | None, device: str | None) -> bool:
    """Whether a dry run plans for this machine, rather than for a cluster or another device."""
    return world_size is None and device in (None, this_device())


def _report(meta: MetaModel, recipe: Recipe) -> StageReport:
    estimate = estimate_of(meta, recipe.machine)
    return StageReport(meta, estimate, verdict_of(meta, estimate, recipe))
