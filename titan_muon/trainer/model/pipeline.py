"""Pipeline stages: checks of the schedule, and initial values independent of the pipeline degree."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from titan_muon.assignment.rules import Assignment
from titan_muon.trainer.device import forked_rng
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.torchtitan_sections import Parallelism


def check_pipeline(model: Any, degrees: Parallelism) -> None:
    """Raise RecipeError for an unusable schedule and for stages unfit for the model."""
    if degrees.pipeline_parallel_degree == 1:
        return
    schedule, parts = _schedule(degrees), degrees.module_fqns_per_model_part
    if parts is None:
        return
    # TorchTitan silently drops unlisted modules, and runs stages in the listed order.
    expected = ["tok_embeddings", *(f"layers.{index}" for index in range(len(model.layers))), "norm", "lm_head"]
    named = [name for part in parts for name in part]
    if named != expected:
        wrong = next((pair for pair in zip(named, expected, strict=False) if pair[0] != pair[1]), None)
        problem = f"it has {wrong[0]!r} in the place of {wrong[1]!r}" if wrong else f"it names {len(named)} modules"
        raise RecipeError(
            f"must name the model's {len(expected)} modules once each and in "
            f"order, from 'tok_embeddings' over 'layers.0' to 'norm' and 'lm_head'; {problem}",
            key="parallelism.module_fqns_per_model_part",
        )
    ranks, single = degrees.pipeline_parallel_degree, issubclass(schedule, PipelineScheduleSingle)
    if len(parts) % ranks or (single and len(parts) != ranks):
        fit = f"{ranks} parts" if single else f"a multiple of {ranks} parts"
        raise RecipeError(
            f"has {len(parts)} parts; {degrees.pipeline_parallel_schedule} on "
            f"parallelism.pipeline_parallel_degree = {ranks} takes {fit}",
            key="parallelism.module_fqns_per_model_part",
        )


def _schedule(degrees: Parallelism) -> type:
    key, name = "parallelism.pipeline_parallel_schedule", degrees.pipeline_parallel_schedule
    try:
        schedule: type = get_schedule_class(name)
    except ValueError as error:
        raise RecipeError(f"= {name!r}: {error}", key=key) from error
    if schedule is ScheduleZBVZeroBubble and name != "ZBVZeroBubble":
        # TorchTitan finds the rank with the loss by this spelling only.
        raise RecipeError(f"= {name!r}: write it 'ZBVZeroBubble'", key=key)
    if schedule is ScheduleDualPipeV:
        problem = "TorchTitan would report the loss of a rank that has none; use 'ZBVZeroBubble'"
        raise RecipeError(f"= {name!r}: {problem}", key=key)
    if schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        raise RecipeError(f"= {name!r} has no order of its own; name another", key=key)
    return schedule


def wrap_pipelining(pipelining_fn: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """`pipelining_fn` with the whole model's initial values in the stages."""

    def pipeline(model: nn.Module, **kwargs: Any) -> Any:
        schedule, parts, has_first, has_last = pipelining_fn(model, **kwargs)
        for part in parts:
            part.init_weights = partial(init_within, model, part, recipe.debug.seed)
        return schedule, parts, has_first, has_last

    return pipeline


def init_within(whole: nn.Module, part: Any, seed: int, *, buffer_device: torch.device | None = None) -> None:
    """Draw the initial values of `whole`, the model on the meta device, and keep those of the stage `part`.

    Initializers must draw for meta tensors on the default device, as in `models.common`.
    """
    device = next(part.parameters()).device
    complete: Any = copy.deepcopy(whole)
    for name, module in part.named_children():
        if isinstance(module, nn.ModuleDict):
            complete.get_submodule(name).update(module)
        else:
            setattr(complete, name, module)
    # TorchTitan seeds each stage differently.
    with forked_rng(device), device:
        torch.manual_seed(seed)
        complete.init_weights(buffer_device=buffer_device)
    del part.init_weights


def stage_ranks(world_size: int, stages: int, stage: int) -> range:
    """Ranks of pipeline stage `stage` of `stages`."""
    size = world_size // stages
    return range(stage * size, (stage + 1) * size)


def pipeline_line(ranks: range, world_size: int, assigned: Sequence[Assignment]) -> str:
    """Heading for a pipeline rank."""
    stage, elements = ranks.start // len(ranks), sum(prod(a.shape) for a in assigned)
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"pipeline rank {stage} of {world_size // len(ranks)}, {where}: {elements:,} parameters"
