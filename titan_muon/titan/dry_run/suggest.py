"""`--suggest`: searches layouts of a recipe for the fastest modelled step that fits into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from titan_muon.assignment.rules import Assignment
from titan_muon.dry_run.memory import momentum_bytes
from titan_muon.options import plural
from titan_muon.plan.terms.machine import MachineRates, planning_machine
from titan_muon.titan.assign.container import offload_of
from titan_muon.titan.dry_run.compare import table
from titan_muon.titan.dry_run.meta_model import whole_model
from titan_muon.titan.dry_run.report import write
from titan_muon.titan.dry_run.stages import StageReport, dry_run
from titan_muon.titan.dry_run.training import STACK, ModelSize, Passes
from titan_muon.titan.dry_run.verdict import MEMORY_ERROR, Verdict
from titan_muon.titan.recipe import Recipe, RecipeError, check_degrees
from titan_muon.titan.recipe.constraints import violations
from titan_muon.titan.recipe.degrees import check_layout, data_ranks, degrees_in_use
from titan_muon.titan.recipe.files import keys_of_the_command_line, written_values
from titan_muon.titan.recipe.sections import Parallelism
from titan_muon.titan.recipe.toml import document_text

SHOWN = 5
MOST_PLANS = 12
"""Plans of a search. Each takes seconds to minutes."""
MOST_TENSOR, MOST_STAGES = 8, 16
COLUMNS = ("layout", "batch", "reshard", "checkpointing", "step s", "GiB", "products s", "FSDP s", "Muon ms", "longest")


@dataclass(frozen=True)
class Candidate:
    """A recipe with lower bounds of its step and memory."""

    recipe: Recipe
    seconds: float
    bytes: float

    @property
    def order(self) -> tuple[float, int, float]:
        """Equal times, to three digits, are ordered by the number of degrees and by memory."""
        return float(f"{self.seconds:.3g}"), len(degrees_in_use(self.recipe)), self.bytes


@dataclass(frozen=True)
class Suggestion:
    """A recipe with the verdicts of its pipeline stages."""

    recipe: Recipe
    verdicts: tuple[Verdict, ...]

    @property
    def slowest(self) -> Verdict:
        return max(self.verdicts, key=lambda verdict: verdict.seconds)

    @property
    def peak(self) -> int:
        return max(verdict.peak for verdict in self.verdicts)

    @property
    def order(self) -> tuple[float, int, float]:
        return Candidate(self.recipe, self.slowest.seconds, self.peak).order


def suggest(recipe: Recipe, world: int, device: str | None, config: str, file: str | None) -> None:
    """Print the best layouts, each of other degrees, and write the first to `file` as a recipe based on `config`.

    Raises RecipeError if no layout fits, and for a file that exists or cannot be written.
    """
    if file is not None and Path(file).exists():
        raise RecipeError(f"--suggest {file}: the file exists; name a new file, or delete it.")
    machine = planning_machine(recipe.machine, "cuda" if device is None else device)
    if machine.capacity == 0:
        raise RecipeError(f"--suggest: the memory of {machine.name} is unknown; plan for GPUs, as by --device cuda.")
    print(f"layouts for {plural(world, 'rank')} of {machine.name}, modelled", flush=True)
    found = search(recipe, world, machine, lambda line: print(f"  {line}", flush=True))
    if not found:
        raise RecipeError(
            f"--suggest: no layout fits into {plural(world, 'rank')} of {machine.name}. Add ranks, or set "
            "training.enable_cpu_offload = true."
        )
    print("\n".join(["", *table(COLUMNS, [_row(suggestion) for suggestion in found])]))
    if file is not None:
        text = _document(found[0], config, file, f"{plural(world, 'rank')} of {machine.name}", machine.capacity)
        write("--suggest", file, text)


def search(recipe: Recipe, world: int, machine: MachineRates, tell: Callable[[str], None]) -> list[Suggestion]:
    """The best layouts, fastest first. `tell` gets a line for each plan."""
    size, whole = whole_model(recipe)
    candidates = sorted(_candidates(recipe, world, machine, size, whole), key=lambda candidate: candidate.order)
    tell(f"{len(candidates):,} layouts, batches and checkpointing modes may fit")
    planned: dict[Parallelism, list[StageReport]] = {}
    best: dict[Parallelism, Suggestion] = {}
    for candidate in candidates:
        degrees = replace(candidate.recipe.parallelism, fsdp_reshard_after_forward="default")
        if degrees in best:
            continue
        # A candidate's time is a lower bound.
        if len(best) >= SHOWN and candidate.order >= sorted(found.order for found in best.values())[SHOWN - 1]:
            break
        if degrees not in planned:
            # A refusal is quick, and does not count.
            if sum(map(bool, planned.values())) == MOST_PLANS:
                continue
            tell(f"plan {len(planned) + 1}: {layout_text(candidate.recipe)}")
            planned[degrees] = _planned(candidate.recipe, world)
        # The plan does not depend on batch, resharding and checkpointing.
        verdicts = tuple(_changed(part, candidate.recipe) for part in planned[degrees])
        if verdicts and all(verdict.fits for verdict in verdicts):
            best[degrees] = Suggestion(candidate.recipe, verdicts)
    return sorted(best.values(), key=lambda found: found.order)[:SHOWN]


def _planned(recipe: Recipe, world: int) -> list[StageReport]:
    """A report for each stage; empty for a refused recipe."""
    try:
        return dry_run(recipe, world, "cuda")
    except RecipeError:
        return []


def _changed(part: StageReport, recipe: Recipe) -> Verdict:
    """The verdict of a stage with the batch, resharding and checkpointing of `recipe`."""
    passes = Passes(recipe, part.meta.world_size, part.meta.size, part.meta.assigned, part.meta.device)
    return replace(part.verdict, training=passes.estimate(part.estimate.machine))


def _candidates(
    recipe: Recipe, world: int, machine: MachineRates, size: ModelSize, whole: Sequence[Assignment]
) -> Iterator[Candidate]:
    """Recipes that training accepts, as far as their keys tell, and that may fit."""
    element_bytes = 4 if recipe.training.dtype == "float32" else 2
    state_bytes = momentum_bytes(1, recipe.muon.state_dtype) if offload_of(recipe) == "none" else 0
    stored_bytes = 0 if offload_of(recipe) == "parameters" else element_bytes
    for changed in _layouts(recipe, world, whole):
        stage = _stage(whole, changed.parallelism.pipeline_parallel_degree)
        stored = Passes(changed, world, size, stage).stored
        if stored * (stored_bytes + state_bytes) > machine.capacity:
            continue
        for varied in _variants(changed, world):
            passes = Passes(varied, world, size, stage)
            # FSDP frees the gradients of a single pass as the step ends, so they are not at the peak of activations.
            held = stored_bytes * (2 if passes.passes > 1 else 1) + state_bytes
            least = stored * held + passes.memory().total + machine.communicators.context
            if least * (1 + MEMORY_ERROR) <= machine.capacity:
                yield Candidate(varied, passes.estimate(machine).seconds, least)


def _layouts(recipe: Recipe, world: int, whole: Sequence[Assignment]) -> Iterator[Recipe]:
    """The recipe with every set of degrees of FSDP, HSDP, TP, EP and PP."""
    experts = max((a.shape[0] for a in whole if len(a.shape) == STACK), default=1)
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    tensor, stages = ([d for d in degrees if d <= most] for most in (MOST_TENSOR, MOST_STAGES))
    routed = [degree for degree in degrees if experts % degree == 0]
    for replicas, tp, ep, pp in product(degrees, tensor, routed, stages):
        changed = replace(
            recipe.parallelism,
            data_parallel_shard_degree=-1,
            data_parallel_replicate_degree=replicas,
            tensor_parallel_degree=tp,
            expert_parallel_degree=ep,
            pipeline_parallel_degree=pp,
        )
        changed_recipe = replace(recipe, parallelism=changed)
        with suppress(RecipeError):
            check_layout(changed_recipe, world)
            yield changed_recipe


def _variants(recipe: Recipe, world: int) -> Iterator[Recipe]:
    """The recipe with every local batch, resharding and checkpointing, unless training would refuse it."""
    training, stages = recipe.training, recipe.parallelism.pipeline_parallel_degree
    batches = [training.local_batch_size]
    if training.global_batch_size != -1:
        share = training.global_batch_size // data_ranks(recipe, world)
        batches = [2**power for power in range(share.bit_length()) if share % 2**power == 0]
    # "default" keeps gathered parameters under pipeline parallelism.
    policies = ("always" if stages > 1 else "default", "never")
    modes = dict.fromkeys(("none", "selective", "full", recipe.activation_checkpoint.mode))
    for batch in batches:
        varied = replace(recipe, training=replace(training, local_batch_size=batch))
        try:
            check_degrees(varied, world)
        except RecipeError:
            continue
        if any(violations(varied)):
            continue
        for policy, mode in product(policies, modes):
            yield replace(
                varied,
                parallelism=replace(varied.parallelism, fsdp_reshard_after_forward=policy),
                activation_checkpoint=replace(varied.activation_checkpoint, mode=mode),
            )


def _stage(whole: Sequence[Assignment], stages: int) -> list[Assignment]:
    """The embedding and the layers of about the first of `stages`."""
    inner = [a for a in whole if "layers." in a.fqn]
    outer = [a for a in whole if "layers." not in a.fqn]
    return [*(outer if stages == 1 else outer[:1]), *inner[: len(inner) // stages]]


def layout_text(recipe: Recipe) -> str:
    """The degrees above 1."""
    return ", ".join(f"{name.upper()} {degree}" for name, degree in degrees_in_use(recipe).items()) or "FSDP"


def _row(suggestion: Suggestion) -> list[str]:
    recipe, verdict = suggestion.recipe, suggestion.slowest
    return [
        layout_text(recipe),
        str(recipe.training.local_batch_size),
        recipe.parallelism.fsdp_reshard_after_forward,
        recipe.activation_checkpoint.mode,
        f"{verdict.seconds:,.3g}",
        f"{suggestion.peak / 2**30:,.1f}",
        f"{verdict.training.compute:,.3g}",
        f"{verdict.training.fsdp:,.3g}",
        f"{1e3 * (verdict.muon + verdict.others):,.3g}",
        longest_part(verdict),
    ]


def longest_part(verdict: Verdict) -> str:
    """The longest part of a step, with its share. FSDP and products run side by side."""
    training = verdict.training
    parts = {
        "products": training.compute,
        "FSDP": training.fsdp,
        "tensor parallelism": training.tensor,
        "expert parallelism": training.experts,
        "optimizers": verdict.muon + verdict.others,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} {100 * parts[name] / verdict.seconds:.0f} %"


def _document(suggestion: Suggestion, config: str, file: str, machine: str, capacity: int) -> str:
    """A recipe file: the base, and the keys with other values."""
    recipe, written = suggestion.recipe, written_values(suggestion.recipe)
    base = os.path.relpath(config, Path(file).parent)
    keys = {key: written[key] for key in keys_of_the_command_line(config, recipe)}
    seconds, peak = suggestion.slowest.seconds, suggestion.peak / 2**30
    head = f"# {machine}: {seconds:,.3g} s a step, {peak:,.1f} of {capacity / 2**30:,.0f} GiB, modelled by --suggest.\n"
    return head + document_text({"base": base, **keys})
