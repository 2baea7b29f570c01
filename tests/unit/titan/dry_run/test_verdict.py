"""The verdict of a dry run: memory against the GPU, the training step, and Muon's share."""

from dataclasses import replace
from math import prod

import pytest
import torch

import models  # noqa: F401 (registers the families)
from titan_muon import assign
from titan_muon.assignment.rules import Assignment
from titan_muon.forecast.model import Memory
from titan_muon.planner.machine import MACHINES
from titan_muon.trainer.dry_run.training import TRAINING_SHARE, ModelSize, Passes, PassMemory, Training
from titan_muon.trainer.dry_run.verdict import Verdict, memory_parts
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.recipe.sections import ActivationCheckpoint

H100 = MACHINES["h100x8"]
GIB = 2**30


def llama3_8b() -> list[Assignment]:
    with torch.device("meta"):
        return assign(model_spec("llama3", "8B", on_cpu=False).model.build())


SIZE = ModelSize(token_flops=6 * 7_504_000_000, vocabulary=128256, routed=0.0)


def recipe(mode: str = "selective", **parallelism: object) -> Recipe:
    plain = Recipe(activation_checkpoint=ActivationCheckpoint(mode=mode))  # type: ignore[arg-type]
    training = replace(plain.training, local_batch_size=1, global_batch_size=-1, seq_len=4096)
    return replace(plain, training=training, parallelism=replace(plain.parallelism, **parallelism))  # type: ignore[arg-type]


def test_modelled_activations_of_llama_match_a_rehearsal() -> None:
    """14.4 GiB beside parameters and states: llama3_8b rehearsed on 1,024 ranks, docs/results/rehearsal.md."""
    memory = Passes(recipe(), 1024, SIZE, llama3_8b()).memory()
    assert memory.total / GIB == pytest.approx(14.83 - 0.22 - 0.23, rel=0.1)


def test_checkpointing_and_parallelism_lower_the_activations() -> None:
    kept = {mode: Passes(recipe(mode), 64, SIZE, llama3_8b()).memory() for mode in ("none", "selective", "full")}
    assert kept["none"].activations > 2 * kept["selective"].activations > 4 * kept["full"].activations
    split = Passes(recipe(tensor_parallel_degree=8), 64, SIZE, llama3_8b()).memory()
    assert split.logits == kept["selective"].logits // 8
    assert split.activations < kept["selective"].activations / 2
    every = Passes(recipe("none", tensor_parallel_degree=8), 64, SIZE, llama3_8b()).memory()
    assert every.activations < kept["none"].activations / 4


@pytest.mark.parametrize(
    ("policy", "stages", "bytes_of_an_element"),
    [("never", 1, 2), ("default", 2, 2 + 4), ("never", 2, 2 + 4), ("always", 2, 4)],
)
def test_parameters_that_stay_gathered_count_in_memory(policy: str, stages: int, bytes_of_an_element: int) -> None:
    """TorchTitan's `default` is `never` under pipeline parallelism, whose gradients are summed in float32."""
    asked = recipe(fsdp_reshard_after_forward=policy, pipeline_parallel_degree=stages)
    asked = replace(asked, training=replace(asked.training, local_batch_size=4))
    matrices = llama3_8b()
    elements = sum(prod(a.shape) for a in matrices)
    gathered = Passes(asked, 64, SIZE, matrices).memory().gathered
    layers = Passes(recipe(), 64, SIZE, matrices).memory().gathered
    assert gathered == bytes_of_an_element * elements + (layers if policy == "always" else 0)


def test_the_products_grow_with_tokens_and_are_shared_by_all_ranks() -> None:
    whole = recipe()
    step = Passes(whole, 64, SIZE, llama3_8b()).estimate(H100)
    batch = replace(whole, training=replace(whole.training, global_batch_size=256))
    four = Passes(batch, 64, SIZE, llama3_8b()).estimate(H100)
    assert (step.passes, four.passes) == (1, 4)
    assert four.seconds == pytest.approx(4 * step.seconds)
    assert four.tokens == 4 * step.tokens == 256 * 4096
    assert step.seconds == pytest.approx(SIZE.token_flops * 4096 / (H100.flops["bfloat16"] * TRAINING_SHARE))
    assert Passes(recipe(tensor_parallel_degree=8), 64, SIZE, llama3_8b()).estimate(H100).seconds == step.seconds / 8


def verdict(states: int, passes: int = 1) -> Verdict:
    memory = Memory(10 * GIB, 10 * GIB, states, 1 * GIB, 2 * GIB, 0, 0, 0, ())
    training = Training(passes, 1024 * passes, 2.5, PassMemory(20 * GIB, 4 * GIB, 2 * GIB))
    return Verdict(training, 0.02, 0.005, 0.01, memory, 5 * GIB, 79 * GIB)


def test_the_peak_is_the_maximum_of_backward_and_step() -> None:
    assert verdict(10 * GIB).peak == (10 + 10 + 5 + 26) * GIB
    assert verdict(10 * GIB, passes=2).peak == (10 + 10 + 5 + 10 + 26) * GIB, "accumulated gradients stay"
    small = replace(verdict(10 * GIB), training=replace(verdict(0).training, memory=PassMemory(0, 0, 0)))
    assert small.peak == (10 + 10 + 5 + 10 + 1 + 2) * GIB
    captured = replace(verdict(0).memory, optimizer_states=10 * GIB, keeps_buffers=True)
    assert replace(verdict(0), memory=captured).peak == (10 + 10 + 5 + 26 + 1 + 2) * GIB, "buffers stay in backward"
    assert verdict(10 * GIB).fits
    assert not verdict(40 * GIB).fits
    assert sum(memory_parts(verdict(GIB)).values()) >= verdict(GIB).peak


def test_the_overhead_compares_with_a_step_of_adamw() -> None:
    assert verdict(GIB).overhead == pytest.approx((0.025 - 0.01) / (2.5 + 0.01))
