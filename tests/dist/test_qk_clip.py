"""QK-clip on any layout equals QK-clip on whole weights; each rank observes only local tokens and heads."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.c10d_counter import Call, CollectiveCounter
from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import train
from tests.reference_qk_clip import HEADS, LOGITS, clipped, layer, whole_weights
from titan_muon import transformers_qk_clip
from titan_muon.owned.param import place_on_owners
from titan_muon.owned.state_dict import gather
from titan_muon.plugins.qk_clip import QKClip

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "fsdp": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp_tp": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "tp_columns": ((2, 2), (Shard(0), Shard(1))),
}


def placed_weights() -> dict[str, dict[str, Tensor]]:
    """The same projections once per layout; each `owned` projection has another owner, every rank has the `plain`
    projections."""
    weights = {}
    for name, (shape, placements) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", shape)
        weights[name] = {
            key: distribute_tensor(weight, mesh, placements, src_data_rank=None)
            for key, weight in whole_weights().items()
        }
    weights["plain"] = whole_weights()
    mesh = init_device_mesh("cpu", (4,))
    weights["owned"] = {
        key: place_on_owners(weight, mesh, [number % 4]) for number, (key, weight) in enumerate(whole_weights().items())
    }
    return weights


def observed(rank: int) -> Tensor:
    """A rank's observations: the largest logit of each head on one rank, smaller logits elsewhere."""
    return torch.tensor([logit if head % 4 == rank else logit / (2 + rank) for head, logit in enumerate(LOGITS)])


def differing(rank: int, world_size: int) -> tuple[list[str], list[Call]]:
    """Weights with a difference from the reference after two steps, and the collectives of a step."""
    weights = placed_weights()
    clip = QKClip([layer(tensors, name) for name, tensors in weights.items()])
    calls = []
    for _ in range(2):
        for name in weights:
            if name == "fsdp_tp":
                # Tensor parallelism: a rank computes half of the heads.
                half = rank % 2 * HEADS // 2
                clip.observe(name, torch.tensor(LOGITS[half : half + HEADS // 2]), first_head=half)
            else:
                clip.observe(name, observed(rank))
        with CollectiveCounter() as counter:
            clip.start_reduce()
            clip.apply()
        calls = counter.calls
    expected = clipped(clipped(whole_weights(), LOGITS, 100.0, 0.5), LOGITS, 100.0, 0.5)
    wrong = []
    for name, tensors in weights.items():
        for key, tensor in tensors.items():
            value = gather(tensor).detach() if isinstance(tensor, DTensor) else tensor
            if not torch.allclose(value, expected[key], rtol=1e-6):
                wrong.append(f"{name}.{key}")
    return wrong, calls


def test_every_layout_equals_clipping_of_whole_weights_with_a_single_collective() -> None:
    for wrong, calls in run_ranks(differing, 4):
        assert wrong == []
        assert [call.payload for call in calls] == [4 * HEADS * (len(LAYOUTS) + 2)], "one float32 for each head"


# Sums in another order differ in the last digits, and TorchTitan's experts compute in bfloat16.
TOLERANCE = 2e-3
TRAINED: dict[str, tuple[str, list[str]]] = {
    "fsdp": ("llama3", []),
    "hsdp": ("llama3", ["--parallelism.data_parallel_replicate_degree", "2"]),
    "cp": ("llama3", ["--parallelism.context_parallel_degree", "2"]),
    "owned": ("llama3", ["--placement.muon", "owned"]),
    "tp": ("deepseek_v3", ["--parallelism.tensor_parallel_degree", "2"]),
    "ep": ("deepseek_v3", ["--parallelism.expert_parallel_degree", "2"]),
    # Each rank observes the layers of the stage and reports all layers. Observations before the first step do not
    # count: a trial run on uninitialized memory, which deterministic runs fill with NaN.
    "pp": (
        "llama3",
        ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2", "--debug.deterministic"],
    ),
}
NEEDS = {
    "ep": tiny.needs_torch_for("parallelism.expert_parallel_degree"),
    "pp": tiny.needs_torch_for("parallelism.pipeline_parallel_degree"),
}


def trained(rank: int, world_size: int, path: str, overrides: list[str]) -> list[dict[int, Any]]:
    """Losses and reported attention logits, by step."""
    folder = train(path, overrides)
    dist.barrier()
    return [tiny.records(folder, key) for key in ("loss", "qk")]


def run(folder: Path, world_size: int, family: str, *overrides: str) -> list[dict[int, Any]]:
    """A short run with clipped heads in every step."""
    file = folder / "tiny.toml"
    if not file.exists():
        tiny.write_recipe(folder)
    options = {"model.name": family, "model.flavor": "tiny", "training.steps": 2, "training.seq_len": 256}
    options |= {"training.local_batch_size": 1, "training.global_batch_size": 2, "muon.expert.ns_dtype": "float32"}
    options |= {"validator.enable": "false", "checkpoint.enable": "false", "metrics.enable_tensorboard": "false"}
    options |= {"qk_clip.mode": "clip", "qk_clip.threshold": 3.0 if family == "llama3" else 0.05}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return run_ranks(trained, world_size, str(file), [*words, *overrides])[0]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[dict[int, Any]]]]:
    """Folder of a run on one rank, with gradients accumulated over two micro-batches."""

    @cache
    def reference(family: str) -> tuple[Path, list[dict[int, Any]]]:
        folder = tmp_path_factory.mktemp(family)
        return folder, run(folder, 1, family)

    return reference


@pytest.mark.parametrize("layout", [pytest.param(name, marks=NEEDS.get(name, ())) for name in TRAINED])
def test_two_ranks_clip_as_a_single_rank(layout: str, one_rank: Callable) -> None:
    family, degrees = TRAINED[layout]
    folder, (losses, logits) = one_rank(family)
    found_losses, found_logits = run(folder, 2, family, *degrees)
    assert all(step["heads_above_threshold"] > 0 for step in logits.values()), "clipping has to matter"
    assert found_losses == pytest.approx(losses, abs=TOLERANCE)
    for step, expected in logits.items():
        assert found_logits[step]["max_logit"] == pytest.approx(expected["max_logit"], rel=1e-2), step


def clipped_llama(rank: int, world_size: int) -> dict[str, Tensor]:
    """The attention's weights after a clipped step of Transformers' Llama under FSDP2; each rank has a sequence."""
    from tests.unit.fsdp.test_transformers_attention import batch, model

    llama = model()
    inputs = batch()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in llama.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(llama, mesh=mesh)
        inputs = {name: tensor[rank : rank + 1] for name, tensor in inputs.items()}
    clip = transformers_qk_clip(llama, threshold=2.0)
    llama(**inputs)
    clip.apply()
    projections = {name: p for name, p in llama.named_parameters() if "q_proj" in name or "k_proj" in name}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in projections.items()}


def test_attention_of_transformers_is_clipped_alike_under_fsdp() -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(clipped_llama, 2)
    (alone,) = run_ranks(clipped_llama, 1)
    for name, weight in alone.items():
        torch.testing.assert_close(first[name], weight)
        assert torch.equal(first[name], second[name])
