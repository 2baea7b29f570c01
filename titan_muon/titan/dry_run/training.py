"""Estimates a training step without the optimizer: time and memory of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_muon.assignment.rules import Assignment
from titan_muon.plan.terms.machine import Link, MachineRates
from titan_muon.tensors.dtensor import layer_of
from titan_muon.titan.recipe import Recipe
from titan_muon.titan.recipe.degrees import data_ranks, local_batch_size

TRAINING_SHARE = 0.57
"""Share of the rate of large products: 400 of 700 TFLOP/s on an H100, 40 % of the data sheet.
Llama 3 reached 38 to 43 % (Grattafiori et al., 2024, arXiv:2407.21783).
"""
LOGIT_BYTES = 10
"""Bytes per logit at the peak: bfloat16, a float32 copy, and a float32 gradient."""
RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0, "memory_budget": 0.5}
"""Share of forward's products that backward recomputes."""
ROW_PARALLEL = (".wo.weight", ".w2.weight", ".o_proj.weight", ".down_proj.weight")
"""Linear layers with unsharded outputs under tensor parallelism."""


class ModelSize(NamedTuple):
    """Size of a model besides shapes."""

    token_flops: int  # of forward and backward per token, by TorchTitan's count, without recomputation
    vocabulary: int  # rows of the head
    routed: float  # share of the experts that a token visits


@dataclass(frozen=True)
class PassMemory:
    """Bytes of a rank in forward and backward, beside parameters, gradients and states."""

    activations: int  # kept for backward, and recomputed ones of a layer
    logits: int  # with their gradient
    gathered: int  # unsharded parameters, and unsharded gradients under pipeline parallelism

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gathered


@dataclass(frozen=True)
class Training:
    """Estimate of forward and backward in a step on a rank. Times in seconds."""

    passes: int
    tokens: int  # over all ranks
    compute: float  # matrix products
    fsdp: float  # collectives of FSDP, overlapped with `compute`
    tensor: float  # exposed collectives of tensor parallelism
    experts: float  # exposed collectives of expert parallelism
    memory: PassMemory

    @property
    def seconds(self) -> float:
        return max(self.compute, self.fsdp) + self.tensor + self.experts


@dataclass(frozen=True)
class _Degrees:
    replicas: int
    data: int
    context: int
    tensor: int
    experts: int
    stages: int

    @classmethod
    def of(cls, recipe: Recipe, world: int) -> _Degrees:
        degrees = recipe.parallelism
        return cls(
            degrees.data_parallel_replicate_degree,
            data_ranks(recipe, world),
            degrees.context_parallel_degree,
            degrees.tensor_parallel_degree,
            degrees.expert_parallel_degree,
            degrees.pipeline_parallel_degree,
        )

    @property
    def shards(self) -> int:
        return self.data // self.replicas * self.context

    @property
    def expert_shards(self) -> int:
        return max(1, self.shards * self.tensor // self.experts)


def training_of(
    recipe: Recipe, world: int, size: ModelSize, stage: Sequence[Assignment], machine: MachineRates
) -> Training:
    """Estimate for a pipeline stage."""
    degrees = _Degrees.of(recipe, world)
    local = local_batch_size(recipe, world)
    whole = recipe.training.global_batch_size
    passes = 1 if whole == -1 else max(1, whole // (local * degrees.data))
    tokens = local * recipe.training.seq_len // degrees.context
    pipelined = 1 if degrees.stages == 1 else 1 + (degrees.stages - 1) / _microbatches(recipe, local)
    recomputed = 1 + RECOMPUTED[recipe.activation_checkpoint.mode] / 3
    flops = size.token_flops * tokens * passes * recomputed / (degrees.tensor * degrees.stages)
    compute = flops / (machine.flops["bfloat16"] * TRAINING_SHARE) * pipelined
    return Training(
        passes=passes,
        tokens=local * degrees.data * passes * recipe.training.seq_len,
        compute=compute,
        fsdp=_fsdp_seconds(recipe, degrees, stage, machine, local, passes),
        tensor=_tensor_seconds(degrees, stage, machine, tokens * passes),
        experts=_expert_seconds(degrees, stage, machine, tokens * passes, size),
        memory=pass_memory(recipe, world, size, stage),
    )


def pass_memory(recipe: Recipe, world: int, size: ModelSize, stage: Sequence[Assignment]) -> PassMemory:
    """Memory of forward and backward in a pipeline stage.

    Activations are the inputs and outputs of linear layers that checkpointing keeps; a test compares them with a
    rehearsal (docs/rehearsal.md).
    """
    degrees, local = _Degrees.of(recipe, world), local_batch_size(recipe, world)
    tokens = local * recipe.training.seq_len // degrees.context
    in_flight = 1
    if degrees.stages > 1:
        # Under 1F1B the first stage holds a microbatch per stage.
        tokens = tokens * recipe.parallelism.pipeline_parallel_microbatch_size // local
        in_flight = min(degrees.stages, _microbatches(recipe, local))
    activations_kept, whole = 0.0, 0.0
    for layer in _layers(stage):
        every = sum(_activations(a, tokens, size, degrees) for a in layer)
        hidden = tokens * _width(layer) / degrees.tensor
        activations_kept += {
            "none": every,
            "full": hidden,
            "memory_budget": hidden + recipe.activation_checkpoint.memory_budget * every,
            "selective": hidden + sum(_kept(a, tokens, size, degrees) for a in layer),
        }[recipe.activation_checkpoint.mode]
        whole = max(whole, every)
    dtype = TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize
    again = 0.0 if recipe.activation_checkpoint.mode == "none" else dtype * whole
    others = _vocabulary(stage, size)
    has_head = any(a.fqn.split(".")[0] in ("lm_head", "output", "head") for a in others) or degrees.stages == 1
    logits = LOGIT_BYTES * tokens * size.vocabulary / degrees.tensor if has_head else 0.0
    return PassMemory(
        activations=int(dtype * activations_kept * in_flight + max(0.0, again - logits)),
        logits=int(logits),
        gathered=int(_gathered_bytes(recipe, degrees, size, stage)),
    )


def _gathered_bytes(recipe: Recipe, degrees: _Degrees, size: ModelSize, stage: Sequence[Assignment]) -> float:
    """Peak of FSDP's unsharded tensors: a layer, the next one and the head, or the whole stage without resharding."""
    whole = sum(_unsharded(a, degrees) for a in stage)
    layers = [sum(_unsharded(a, degrees) for a in layer) for layer in _layers(stage)]
    head = max((_unsharded(a, degrees) for a in _vocabulary(stage, size)), default=0.0)
    kept = 2 * max(layers, default=0.0) + head if reshards_after_forward(recipe) else whole
    # Pipeline stages sum gradients of all microbatches before the reduction.
    summed = whole * TORCH_DTYPE_MAP[recipe.training.mixed_precision_reduce].itemsize if degrees.stages > 1 else 0.0
    return kept * TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize + summed


def reshards_after_forward(recipe: Recipe) -> bool:
    """Whether FSDP frees gathered parameters between forward and backward."""
    degrees = recipe.parallelism
    return get_fsdp_reshard_after_forward_policy(
        degrees.fsdp_reshard_after_forward, degrees.pipeline_parallel_degree > 1
    )


def _vocabulary(stage: Sequence[Assignment], size: ModelSize) -> list[Assignment]:
    """Embedding and head."""
    return [a for a in stage if len(a.shape) == 2 and size.vocabulary in a.shape]


def _microbatches(recipe: Recipe, local: int) -> int:
    return max(1, local // recipe.parallelism.pipeline_parallel_microbatch_size)


def _layers(stage: Sequence[Assignment]) -> list[list[Assignment]]:
    layers: dict[str, list[Assignment]] = {}
    for a in stage:
        if "layers." in a.fqn and len(a.shape) > 1:
            layers.setdefault(layer_of(a.fqn), []).append(a)
    return list(layers.values())


def _width(layer: Sequence[Assignment]) -> int:
    """Width of the residual stream: the most common side."""
    sides = [side for a in layer for side in set(a.shape[-2:])]
    return max(set(sides), key=lambda side: (sides.count(side), -side))


def _is_stack(a: Assignment) -> bool:
    return len(a.shape) == 3


def _activations(a: Assignment, tokens: int, size: ModelSize, degrees: _Degrees) -> float:
    """Elements of the inputs and outputs of a linear layer, or of a token's experts."""
    through = tokens * (size.routed * a.shape[0] if _is_stack(a) else 1)
    return through * sum(a.shape[-2:]) / degrees.tensor


def _kept(a: Assignment, tokens: int, size: ModelSize, degrees: _Degrees) -> float:
    """Elements that selective checkpointing keeps: half of the outputs, attention, and the routed tokens."""
    if _is_stack(a):
        # The tokens after all-to-all, kept once for the three products of an expert.
        return tokens * size.routed * a.shape[0] * min(a.shape[-2:]) / degrees.tensor
    cut = 1 if a.fqn.endswith(ROW_PARALLEL) else degrees.tensor
    attention = a.shape[1] / degrees.tensor if a.fqn.endswith((".wo.weight", ".o_proj.weight")) else 0
    return tokens * (a.shape[0] / 2 / cut + attention)


def _unsharded(a: Assignment, degrees: _Degrees) -> float:
    return prod(a.shape) / (degrees.experts if _is_stack(a) else degrees.tensor)


def _link(machine: MachineRates, ranks: int) -> Link:
    return machine.node if ranks <= machine.ranks_per_node else machine.network


def _fsdp_seconds(
    recipe: Recipe, degrees: _Degrees, stage: Sequence[Assignment], machine: MachineRates, local: int, passes: int
) -> float:
    gathered = TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize
    reduced = TORCH_DTYPE_MAP[recipe.training.mixed_precision_reduce].itemsize
    gathers, total = _gathers(recipe, degrees, local), 0.0
    for a in stage:
        shards = degrees.expert_shards if _is_stack(a) else degrees.shards
        elements = _unsharded(a, degrees)
        # TP and EP ranks are neighbours, so FSDP ranks are that many ranks apart.
        reach = shards * (degrees.experts if _is_stack(a) else degrees.tensor)
        sent = elements * (shards - 1) / shards * (gathers * gathered + reduced) * passes
        total += sent / _link(machine, reach).bandwidth
        if degrees.replicas > 1:
            ring = 2 * (degrees.replicas - 1) / degrees.replicas * elements / shards * reduced
            total += ring * passes / machine.network.bandwidth
    return total


def _gathers(recipe: Recipe, degrees: _Degrees, local: int) -> int:
    """All-gathers of a parameter in a pass."""
    if not reshards_after_forward(recipe):
        return 1
    # 1F1B does not reshard after backward, so each later forward finds the parameters of the backward before it.
    return 2 if degrees.stages == 1 else 1 + _microbatches(recipe, local)


def _tensor_seconds(degrees: _Degrees, stage: Sequence[Assignment], machine: MachineRates, tokens: int) -> float:
    """Seconds of sequence parallelism: two gathers and two reductions per layer, in each direction."""
    ranks, link = degrees.tensor, _link(machine, degrees.tensor)
    sent = sum(8 * 2 * tokens * _width(layer) for layer in _layers(stage)) * (ranks - 1) / ranks
    return sent / link.bandwidth


def _expert_seconds(
    degrees: _Degrees, stage: Sequence[Assignment], machine: MachineRates, tokens: int, size: ModelSize
) -> float:
    ranks, link = degrees.experts, _link(machine, degrees.experts)
    sent = 0.0
    for layer in _layers(stage):
        stacks = [a for a in layer if _is_stack(a)]
        if stacks:
            sent += 4 * 2 * tokens / degrees.tensor * size.routed * stacks[0].shape[0] * _width(layer)
    return sent * (ranks - 1) / ranks / link.bandwidth
