"""Forward and backward of a dry run: memory of a rank, and seconds of the matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_muon.assignment.rules import Assignment
from titan_muon.engine.tensors.dtensor import layer_of
from titan_muon.planner.machine import MachineRates
from titan_muon.trainer.device import passes_dtype
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.recipe.degrees import data_ranks, local_batch_size

TRAINING_SHARE = 0.57
"""Share of the rate of large products: 400 of 700 TFLOP/s on an H100, 40 % of the data sheet.
Llama 3 reached 38 to 43 % (Grattafiori et al., 2024, arXiv:2407.21783).
"""
LOGIT_BYTES = 10
"""Bytes per logit at the peak: bfloat16, a float32 copy, and a float32 gradient."""
STACK = 3
"""Dims of a stack of experts."""
ROW_PARALLEL = (".wo.weight", ".w2.weight", ".o_proj.weight", ".down_proj.weight")
"""Linear layers with unsharded outputs under tensor parallelism."""


class ModelSize(NamedTuple):
    """Size of a model besides shapes."""

    token_flops: int  # per token, by TorchTitan's count: 6 for each parameter that the token visits, and attention
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
    """Forward and backward in a step on a rank."""

    passes: int
    tokens: int  # over all ranks
    seconds: float  # of the matrix products, without recomputation, bubbles and communication
    memory: PassMemory


class Passes:
    """Forward and backward of a pipeline stage with the matrices `stage`, on a rank of `world`.

    Activations are the inputs and outputs of linear layers that checkpointing keeps; a test compares them with a
    rehearsal (docs/results/rehearsal.md).
    """

    def __init__(
        self, recipe: Recipe, world: int, size: ModelSize, stage: Sequence[Assignment], device: str = "cuda"
    ) -> None:
        degrees, training = recipe.parallelism, recipe.training
        self.recipe, self.size, self.world = recipe, size, world
        self.tensor = degrees.tensor_parallel_degree
        self.experts = degrees.expert_parallel_degree
        self.stages = degrees.pipeline_parallel_degree
        data, context = data_ranks(recipe, world), degrees.context_parallel_degree
        local = local_batch_size(recipe, world)
        self.passes = 1 if training.global_batch_size == -1 else max(1, training.global_batch_size // (local * data))
        self.all_tokens = local * data * self.passes * training.seq_len
        self.tokens = local * training.seq_len // context  # of a rank in a pass
        self.microbatches = max(1, local // degrees.pipeline_parallel_microbatch_size) if self.stages > 1 else 1
        # Whether FSDP frees gathered parameters between forward and backward.
        self.reshards = get_fsdp_reshard_after_forward_policy(degrees.fsdp_reshard_after_forward, self.stages > 1)
        self.gathered_bytes = TORCH_DTYPE_MAP[passes_dtype(training.mixed_precision_param, device)].itemsize
        self.reduced_bytes = torch.float32.itemsize
        layers: dict[str, list[Assignment]] = {}
        for a in stage:
            if "layers." in a.fqn and len(a.shape) > 1:
                layers.setdefault(layer_of(a.fqn), []).append(a)
        # Equal layers once, with their count.
        names = {name: tuple((a.fqn.removeprefix(name), a.shape) for a in layer) for name, layer in layers.items()}
        counts = Counter(names.values())
        self.layers = [(layer, counts[kind]) for kind, layer in {names[name]: layers[name] for name in layers}.items()]
        self.shapes = Counter(a.shape for a in stage)
        # Embedding and head.
        self.vocabulary = [a for a in stage if len(a.shape) == 2 and size.vocabulary in a.shape]

    def estimate(self, machine: MachineRates) -> Training:
        flops = self.size.token_flops * self.all_tokens / self.world
        seconds = flops / (machine.flops["bfloat16"] * TRAINING_SHARE)
        return Training(self.passes, self.all_tokens, seconds, self.memory())

    def memory(self) -> PassMemory:
        # Under 1F1B the first stage holds a microbatch per stage.
        tokens = self.tokens // self.microbatches
        recipe, in_flight = self.recipe.activation_checkpoint, min(self.stages, self.microbatches)
        activations, whole = 0.0, 0.0
        for layer, count in self.layers:
            every = sum(self._activations(a, tokens) for a in layer)
            hidden = tokens * _width(layer) / self.tensor
            kept = {
                "none": every,
                "full": hidden,
                "memory_budget": hidden + recipe.memory_budget * every,
                "selective": hidden + sum(self._kept(a, tokens) for a in layer),
            }[recipe.mode]
            activations += kept * count
            whole = max(whole, every)
        again = 0.0 if recipe.mode == "none" else self.gathered_bytes * whole
        has_head = self.stages == 1 or any(
            a.fqn.split(".")[0] in ("lm_head", "output", "head") for a in self.vocabulary
        )
        logits = LOGIT_BYTES * tokens * self.size.vocabulary / self.tensor if has_head else 0.0
        return PassMemory(
            activations=int(self.gathered_bytes * activations * in_flight + max(0.0, again - logits)),
            logits=int(logits),
            gathered=int(self._gathered()),
        )

    def _activations(self, a: Assignment, tokens: int) -> float:
        """Elements of the inputs and outputs of a linear layer, or of a token's experts."""
        through = tokens * (self.size.routed * a.shape[0] if len(a.shape) == STACK else 1)
        return through * sum(a.shape[-2:]) / self.tensor

    def _kept(self, a: Assignment, tokens: int) -> float:
        """Elements that selective checkpointing keeps: half of the outputs, attention, and the routed tokens."""
        if len(a.shape) == STACK:
            # The tokens after all-to-all, kept once for the three products of an expert.
            return tokens * self.size.routed * a.shape[0] * min(a.shape[-2:]) / self.tensor
        cut = 1 if a.fqn.endswith(ROW_PARALLEL) else self.tensor
        attention = a.shape[1] / self.tensor if a.fqn.endswith((".wo.weight", ".o_proj.weight")) else 0
        return tokens * (a.shape[0] / 2 / cut + attention)

    def _gathered(self) -> float:
        """Bytes of FSDP's unsharded tensors at the peak: two layers and the head, or the stage without resharding."""
        kept = whole = sum(self._unsharded(shape) * count for shape, count in self.shapes.items())
        if self.reshards:
            largest = max((sum(self._unsharded(a.shape) for a in layer) for layer, _ in self.layers), default=0.0)
            kept = 2 * largest + max((self._unsharded(a.shape) for a in self.vocabulary), default=0.0)
        # Pipeline stages sum gradients of all microbatches before the reduction.
        return kept * self.gathered_bytes + (whole * self.reduced_bytes if self.stages > 1 else 0.0)

    def _unsharded(self, shape: tuple[int, ...]) -> float:
        """Elements of a parameter after FSDP's all-gather."""
        return prod(shape) / (self.experts if len(shape) == STACK else self.tensor)


def _width(layer: Sequence[Assignment]) -> int:
    """Width of the residual stream: the most common side."""
    sides = [side for a in layer for side in dict.fromkeys(a.shape[-2:])]
    return max(sides, key=lambda side: (sides.count(side), -side))
