"""Plans of published models: a script and a `config.json` agree with the dry run, work is balanced, and the verdict."""

import json
from dataclasses import asdict, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models  # noqa: F401 (registers the families)
from benchmarks.plan_scale import model_seconds
from benchmarks.plan_scale import plan_numbers as planned
from titan_muon import assign, command, preview
from titan_muon.assignment.rules import Assignment
from titan_muon.forecast.config_file import plan_config
from titan_muon.forecast.model import Memory
from titan_muon.planner.machine import MACHINES
from titan_muon.trainer.dry_run.training import TRAINING_SHARE, ModelSize, Passes, PassMemory, Training
from titan_muon.trainer.dry_run.verdict import StageReport, Verdict, dry_run, memory_parts
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, load
from titan_muon.trainer.recipe.sections import ActivationCheckpoint
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3_8b_muon.toml"
WORLD = 64
QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def recipe() -> StageReport:
    (part,) = dry_run(load(CONFIG), WORLD)
    return part


def shard(model: Any) -> nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_the_preview_of_a_script_has_owners_bytes_and_memory_of_the_dry_run(recipe: StageReport) -> None:
    config = trainer_config(load(CONFIG), Run("absent"), WORLD)
    shown = preview(config.model_spec.model.build, shard, WORLD)
    assert shown.model.plan.digest() == recipe.meta.plan.digest()
    for name in ("summary", "timeline", "memory", "loads", "others", "adamw"):
        assert getattr(shown.estimate, name) == getattr(recipe.estimate, name), name


def test_the_plan_of_a_config_has_bytes_and_memory_of_the_dry_run(
    recipe: StageReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    shown = plan_config(str(file), WORLD)
    assert asdict(shown.estimate.memory) == asdict(recipe.estimate.memory)
    assert shown.estimate.summary.bytes_sent_max == recipe.estimate.summary.bytes_sent_max
    assert shown.estimate.summary.ns_flops_max == recipe.estimate.summary.ns_flops_max

    file.write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 2}))
    assert command.main(["plan", str(tmp_path), "--world-size", "8", "--owned", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.*.self_attn.q_proj.weight  (2)" in printed
    assert "Muon step: 14 matrices local, 0 exchanged" in printed


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("{}", "--world-size 8", "cannot read it"),
        (json.dumps(QWEN3_8B), "--world-size 8 --replicas 3", "--replicas 3 does not divide --world-size 8"),
        (json.dumps(QWEN3_8B), "--world-size 8 --replicas 0", "--replicas 0 does not divide --world-size 8"),
        ("", "--world-size 8", "no such file; name the config.json of a model"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(
    text: str, words: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    if text:
        file.write_text(text)
    assert command.main(["plan", str(file), *words.split()]) == 2
    assert problem in capsys.readouterr().err


# --- the balance of published models at scale, on TorchTitan's layouts ---

# Shared by several tests.
plan_numbers = cache(planned)

# The hardest cases: fewest matrices per rank, longest waits between buckets, and links faster than Newton-Schulz. On
# slower links owners are even by bytes. benchmarks/plan_scale.py has all worlds.
# Limits: FLOPs of the busiest rank over their bound; the modelled step without passes over its bound; the step over the
# bound for whole matrices. Whole matrices do not divide evenly, and the first gather and the last return are exposed:
# the part above 1. It grows where the passes get shorter, because links hide behind them.
WORLDS = [
    ("qwen3_8b", 8, 1.11, 1.01, 1.01),
    ("qwen3_8b", 64, 1.11, 1.29, 1.09),
    ("qwen3_8b", 128, 1.35, None, None),
    ("llama3_8b", 64, 1.11, None, None),
    ("llama3_70b", 64, 1.11, 1.04, 1.03),
    ("llama3_70b", 128, None, 1.12, 1.08),
    ("llama3_70b", 256, 1.35, 1.42, 1.05),
    ("qwen3_30b_a3b", 64, 1.11, 1.06, 1.04),
    ("deepseek_v3", 64, 1.11, None, None),
    # 77,354 matrices, including heads of attention. No limit for FLOPs: with owners even by FLOPs and as many
    # rounds, a step would take 200 ms instead of 187, because the links take longer than Newton-Schulz.
    pytest.param("kimi_k2", 512, None, 0.97, 1.20, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "ranks", "flops_bar", "bar", "whole_bar"), WORLDS)
def test_a_plan_is_close_to_the_lower_bounds(
    model: str, ranks: int, flops_bar: float | None, bar: float | None, whole_bar: float | None
) -> None:
    numbers = plan_numbers(model, ranks)
    assert numbers.orthogonalizations == numbers.matrices, "each matrix once in the world"
    assert numbers.buffers_gib <= 4.0
    parts = numbers.newton_schulz_ms + numbers.passes_ms + numbers.waits_ms
    assert numbers.step_ms == pytest.approx(parts)
    if flops_bar is not None:
        assert numbers.flops_over_bound <= flops_bar
    if bar is not None:
        assert numbers.ratio_without_passes <= bar
    if whole_bar is not None:
        assert 1 <= numbers.step_ms / numbers.whole_ms <= whole_bar
    if ranks == 64 and model in ("qwen3_8b", "llama3_8b", "qwen3_30b_a3b"):
        assert numbers.collectives <= 8


def test_returns_hidden_in_forward_are_not_in_the_step() -> None:
    without = plan_numbers("llama3_8b", 64, replicas=8)
    overlapped = plan_numbers("llama3_8b", 64, overlap="forward", replicas=8)
    assert without.hidden_ms == 0 < overlapped.hidden_ms
    assert overlapped.link_ms < without.link_ms
    assert overlapped.step_ms < 0.65 * without.step_ms
    assert overlapped.exposed_ms <= min(overlapped.waits_ms, 0.25 * without.exposed_ms)


@pytest.mark.parametrize(
    ("model", "billions"),
    # As published: Kimi K2 activates 32 of 1,026 billion, with 1.2 billion in the embedding; Llama 3 8B has 0.5 of 8
    # there.
    [("llama3_8b", 7.50), ("kimi_k2", 31.7)],
)
def test_model_flops_count_only_activated_parameters(model: str, billions: float) -> None:
    assert model_seconds(model) == pytest.approx(8192 * 6 * billions * 1e9 / 400e12, rel=2e-3)


def test_replicas_add_return_traffic_and_no_orthogonalization() -> None:
    single, eight = (plan_numbers("llama3_8b", 64, replicas=replicas) for replicas in (1, 8))
    assert eight.orthogonalizations == single.orthogonalizations
    assert eight.link_ms > single.link_ms


# The verdict of a dry run: memory against the GPU, the training step, and Muon's share


H100 = MACHINES["h100x8"]
GIB = 2**30


def llama3_8b() -> list[Assignment]:
    with torch.device("meta"):
        return assign(model_spec("llama3", "8B", on_cpu=False).model.build())


SIZE = ModelSize(token_flops=6 * 7_504_000_000, vocabulary=128256, routed=0.0)


def llama_recipe(mode: str = "selective", **parallelism: object) -> Recipe:
    plain = Recipe(activation_checkpoint=ActivationCheckpoint(mode=mode))  # type: ignore[arg-type]
    training = replace(plain.training, local_batch_size=1, global_batch_size=-1, seq_len=4096)
    return replace(plain, training=training, parallelism=replace(plain.parallelism, **parallelism))  # type: ignore[arg-type]


def passes(mode: str = "selective", world: int = 64, **parallelism: object) -> Passes:
    return Passes(llama_recipe(mode, **parallelism), world, SIZE, llama3_8b())


def test_modelled_activations_of_llama_match_a_rehearsal() -> None:
    """14.4 GiB beside parameters and states: llama3_8b rehearsed on 1,024 ranks, docs/results/rehearsal.md."""
    memory = passes(world=1024).memory()
    assert memory.total / GIB == pytest.approx(14.83 - 0.22 - 0.23, rel=0.1)


def test_checkpointing_and_parallelism_lower_the_activations() -> None:
    kept = {mode: passes(mode).memory() for mode in ("none", "selective", "full")}
    assert kept["none"].activations > 2 * kept["selective"].activations > 4 * kept["full"].activations
    split = passes(tensor_parallel_degree=8).memory()
    assert split.logits == kept["selective"].logits // 8
    assert split.activations < kept["selective"].activations / 2
    every = passes("none", tensor_parallel_degree=8).memory()
    assert every.activations < kept["none"].activations / 4


@pytest.mark.parametrize(
    ("policy", "stages", "bytes_of_an_element"),
    [("never", 1, 2), ("default", 2, 2 + 4), ("never", 2, 2 + 4), ("always", 2, 4)],
)
def test_parameters_that_stay_gathered_count_in_memory(policy: str, stages: int, bytes_of_an_element: int) -> None:
    """TorchTitan's `default` is `never` under pipeline parallelism, whose gradients are summed in float32."""
    asked = llama_recipe(fsdp_reshard_after_forward=policy, pipeline_parallel_degree=stages)
    asked = replace(asked, training=replace(asked.training, local_batch_size=4))
    matrices = llama3_8b()
    elements = sum(prod(a.shape) for a in matrices)
    gathered = Passes(asked, 64, SIZE, matrices).memory().gathered
    layers = Passes(llama_recipe(), 64, SIZE, matrices).memory().gathered
    assert gathered == bytes_of_an_element * elements + (layers if policy == "always" else 0)


def test_the_products_grow_with_tokens_and_are_shared_by_all_ranks() -> None:
    whole = llama_recipe()
    step = Passes(whole, 64, SIZE, llama3_8b()).estimate(H100)
    batch = replace(whole, training=replace(whole.training, global_batch_size=256))
    four = Passes(batch, 64, SIZE, llama3_8b()).estimate(H100)
    assert (step.passes, four.passes) == (1, 4)
    assert four.seconds == pytest.approx(4 * step.seconds)
    assert four.tokens == 4 * step.tokens == 256 * 4096
    assert step.seconds == pytest.approx(SIZE.token_flops * 4096 / (H100.flops["bfloat16"] * TRAINING_SHARE))
    assert passes(tensor_parallel_degree=8).estimate(H100).seconds == step.seconds / 8


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
