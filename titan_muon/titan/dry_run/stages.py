"""The dry run of a recipe for each pipeline stage: plan, times, memory and verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from titan_muon.plan import Summary, summarize
from titan_muon.plan.cost.timeline import Timeline, timeline
from titan_muon.plan.owned.ownership import OwnedTotals
from titan_muon.plan.terms.machine import MachineRates
from titan_muon.planning import planning_machine
from titan_muon.titan.assign.explain import owner_loads, repeats
from titan_muon.titan.dry_run.memory import Memory, memory_per_rank
from titan_muon.titan.dry_run.meta_model import MetaModel, build_meta_model, smallest_world, this_device
from titan_muon.titan.dry_run.verdict import Verdict, verdict_of
from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.degrees import batch_problem


@dataclass(frozen=True)
class StageReport:
    """Estimate for the model or a pipeline stage."""

    meta: MetaModel
    kind: str
    machine: MachineRates
    summary: Summary | None
    timeline: Timeline | None
    loads: Mapping[int, OwnedTotals]
    memory: Memory
    verdict: Verdict
    split: float | None  # seconds of Muon's step with muon.replicas = "split", if replicas repeat the work


def dry_run(recipe: Recipe, world_size: int | None, device: str | None = None) -> list[StageReport]:
    """A report for each pipeline stage. Raises RecipeError like training."""
    world = smallest_world(recipe) if world_size is None else world_size
    # A world size means a cluster of GPUs, mostly planned on a laptop without GPUs.
    kind = device if device is not None else this_device() if world_size is None else "cuda"
    stages = range(recipe.parallelism.pipeline_parallel_degree)
    return [_report(build_meta_model(recipe, world, kind, stage=stage), recipe, kind, stage) for stage in stages]


def _report(meta: MetaModel, recipe: Recipe, kind: str, stage: int) -> StageReport:
    summary = None if meta.plan is None else summarize(meta.plan)
    machine = planning_machine(recipe.machine, kind)
    times = None if meta.plan is None else timeline(meta.plan, machine, overlap=recipe.muon.overlap)
    loads = owner_loads(meta.parameters, summary, meta.ranks)
    memory = memory_per_rank(meta, summary, loads, recipe, kind)
    verdict, split = verdict_of(meta, times, memory, recipe, machine), None
    if meta.plan is not None and summary is not None and repeats(meta.plan, summary):
        try:
            other = replace(recipe, muon=replace(recipe.muon, replicas="split"))
            plan = build_meta_model(other, meta.world_size, kind, stage=stage).plan
            split = None if plan is None else timeline(plan, machine, overlap=recipe.muon.overlap).last.seconds
        except RecipeError:
            # Another option excludes the value.
            split = None
    return StageReport(meta, kind, machine, summary, times, loads, memory, verdict, split)


def problems(recipe: Recipe, world: int) -> Iterator[str]:
    """Reasons why this machine could not train, although the plan is valid."""
    if problem := batch_problem(recipe, world):
        yield problem
    data = recipe.data
    if data.source != "hf":
        from titan_muon.titan.data.documents import Documents

        try:
            _ = Documents(data).all
        except RecipeError as error:
            yield str(error)
        from titan_muon.titan.data.loader import vocab_size

        rows, tokens = recipe.model.vocab_size, vocab_size(data)
        if rows is not None and tokens is not None and rows < tokens:
            yield f"data.tokenizer has {tokens} tokens and the model embeds {rows}; set model.vocab_size = {tokens}"
    if data.tokenizer == "hf" and not Path(data.tokenizer_path or "", "tokenizer.json").is_file():
        yield f"data.tokenizer_path = {data.tokenizer_path!r} has no tokenizer.json on this machine"
