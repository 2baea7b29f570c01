"""The dry run of a recipe for each pipeline stage, and its verdict: whether memory suffices, and Muon's cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titan_muon.forecast.model import Estimate, Memory, estimate_of
from titan_muon.options import plural
from titan_muon.planner.machine import ERROR, MachineRates
from titan_muon.trainer.checks.start import check_machine
from titan_muon.trainer.device import this_device
from titan_muon.trainer.dry_run.meta_model import MetaModel, build_meta_model, smallest_world
from titan_muon.trainer.dry_run.training import TRAINING_SHARE, Passes, Training
from titan_muon.trainer.recipe import Recipe, check_degrees
from titan_muon.trainer.recipe.degrees import degrees_in_use

MOST_OVERHEAD = 1.0
MEMORY_ERROR = 0.1
"""Assumed relative error of the memory estimate."""
EXCHANGES_BETWEEN_ALL = ("all_to_all", "hierarchical", "two_hops")


@dataclass(frozen=True)
class Verdict:
    """Estimate of the optimizers' step and of memory on the fullest rank, in seconds and bytes."""

    training: Training  # forward and backward
    muon: float  # Muon's step on the device or the host, whichever takes longer
    others: float  # AdamW outside of Muon's parameters
    adamw: float  # AdamW for all parameters
    memory: Memory
    communicators: int  # CUDA and NCCL
    capacity: int  # of a GPU; 0 on a CPU

    @property
    def optimizers(self) -> float:
        """Seconds of the optimizers' step."""
        return self.muon + self.others

    @property
    def overhead(self) -> float:
        """What Muon's step takes beyond AdamW's, relative to the products of forward and backward with AdamW's step."""
        return (self.optimizers - self.adamw) / (self.training.seconds + self.adamw)

    @property
    def in_passes(self) -> int:
        accumulated = self.memory.gradients if self.training.passes > 1 else 0
        return self._rest + accumulated + self.memory.kept + self.training.memory.total

    @property
    def in_step(self) -> int:
        return self._rest + self.memory.gradients + self.memory.exchange_buffers + self.memory.orthogonalization

    @property
    def _rest(self) -> int:
        return self.memory.parameters + self.memory.optimizer_states + self.communicators

    @property
    def peak(self) -> int:
        return max(self.in_passes, self.in_step)

    @property
    def fits(self) -> bool:
        return self.capacity == 0 or self.peak * (1 + MEMORY_ERROR) <= self.capacity


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
    metas = [build_meta_model(recipe, world, kind, stage=stage) for stage in stages]
    estimates = [estimate_of(meta, recipe.machine) for meta in metas]
    return [
        StageReport(meta, estimate, verdict_of(meta, estimate, recipe))
        for meta, estimate in zip(metas, estimates, strict=True)
    ]


def is_for_this_machine(world_size: int | None, device: str | None) -> bool:
    """Whether a dry run plans for this machine, rather than for a cluster or another device."""
    return world_size is None and device in (None, this_device())


def verdict_of(meta: MetaModel, estimate: Estimate, recipe: Recipe) -> Verdict:
    """Verdict for a pipeline stage."""
    machine, timeline = estimate.machine, estimate.timeline
    return Verdict(
        training=Passes(recipe, meta.world_size, meta.size, meta.assigned, meta.device).estimate(machine),
        muon=0.0 if timeline is None else max(timeline.last.seconds, timeline.host),
        others=estimate.others,
        adamw=estimate.adamw,
        memory=estimate.memory,
        communicators=_communicator_bytes(meta, recipe, machine),
        capacity=machine.capacity,
    )


def _communicator_bytes(meta: MetaModel, recipe: Recipe, machine: MachineRates) -> int:
    """Bytes of CUDA and NCCL, more for all-to-alls."""
    sizes, experts = machine.communicators, recipe.parallelism.expert_parallel_degree
    if meta.world_size == 1:
        return sizes.context
    buckets = () if meta.plan is None else meta.plan.buckets
    between_all = {b.group for b in buckets if b.exchange in EXCHANGES_BETWEEN_ALL and meta.ranks[0] in b.group}
    if experts > 1:
        between_all.add(tuple(range(experts)))
    peers = sum(min(machine.ranks_per_node, len(group)) - 1 for group in between_all)
    groups = len(degrees_in_use(recipe)) + sum(len(group) > 1 for group in between_all)
    # The rails are communicators too.
    groups += len({b.group for b in buckets if b.exchange == "two_hops" and meta.ranks[0] in b.group})
    return sizes.context + groups * sizes.group + peers * sizes.near_peer


def verdict_lines(verdict: Verdict, meta: MetaModel, machine: MachineRates) -> Iterator[str]:
    """Lines on memory, and on Muon's step beside AdamW's."""
    low, high = ERROR
    yield f"estimate for {plural(meta.world_size, 'rank')} of {machine.name}: modelled, not measured"
    yield from _memory_lines(verdict)
    training, extra = verdict.training, verdict.optimizers - verdict.adamw
    more = f" ({_ms(low * extra)} to {_ms(high * extra)} more)" if extra > 0 else ""
    step, adamw = _ms(verdict.optimizers), _ms(verdict.adamw)
    yield f"  Muon            a step takes {step}, and with AdamW for all parameters {adamw}{more}"
    if verdict.capacity == 0:
        # A CPU orthogonalizes slowly beside its memory, so a percentage says nothing about GPUs.
        yield "                  modelled on a CPU; --device cuda compares GPUs"
        return
    products = (
        f"the products of {training.tokens:,} tokens in {plural(training.passes, 'pass')}, {_ms(training.seconds)} at "
        f"{100 * TRAINING_SHARE:.0f} % of {machine.flops['bfloat16'] / 1e12:,.0f} TFLOP/s"
    )
    if verdict.overhead > MOST_OVERHEAD:
        yield f"                  longer than {products}: the model or its batch is too small for a share"
        return
    yield f"                  {100 * max(0.0, verdict.overhead):,.2f} % over {products}"


def memory_parts(verdict: Verdict) -> dict[str, int]:
    """Bytes of the fullest rank by purpose."""
    memory, passes = verdict.memory, verdict.training.memory
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "states": memory.optimizer_states,
        "activations": passes.activations,
        "logits": passes.logits,
        "gathered layers": passes.gathered,
        "exchange and Newton-Schulz": memory.exchange_buffers + memory.orthogonalization,
        "CUDA and NCCL": verdict.communicators,
    }


def _memory_lines(verdict: Verdict) -> Iterable[str]:
    peak = _gib(verdict.peak)
    if verdict.capacity:
        state = "fits" if verdict.fits else "does not fit" if verdict.peak > verdict.capacity else "may not fit"
        peak = f"{state}: {peak} of {_gib(verdict.capacity)} (within {100 * MEMORY_ERROR:.0f} %)"
    where = "in backward" if verdict.in_passes >= verdict.in_step else "in the optimizer's step"
    yield f"  memory          {peak} at the peak, {where}"
    shown = (f"{name} {size / 2**30:,.1f}" for name, size in memory_parts(verdict).items() if size >= 0.05 * 2**30)
    if text := ", ".join(shown):
        yield f"                  GiB: {text}"
    if not verdict.fits:
        yield "                  more ranks, or training.enable_cpu_offload = true, need less memory on each"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
