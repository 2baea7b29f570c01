"""QK-clip on any layout equals QK-clip on whole weights; each rank observes only local tokens and heads."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import on_ranks, run_ranks
from tests.parity.layouts import LAYOUTS, placed
from tests.reference_qk_clip import HEADS, LOGITS, clipped, layer, whole_weights
from titan_muon import transformers_qk_clip
from titan_muon.owned.param import place_on_owners
from titan_muon.owned.state_dict import gather
from titan_muon.plugins.qk_clip import QKClip

PLACED = ("fsdp", "tp columns", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "plain", "owned")


def placed_weights() -> dict[str, dict[str, Tensor]]:
    """The same projections once per layout; each `owned` projection has another owner."""
    mesh = init_device_mesh("cpu", (4,))
    whole = whole_weights()
    return {
        name: {
            key: place_on_owners(weight, mesh, [number % 4]) if name == "owned" else placed(weight, LAYOUTS[name])
            for number, (key, weight) in enumerate(whole.items())
        }
        for name in PLACED
    }


def observed(rank: int) -> Tensor:
    """A rank's observations: the largest logit of each head on one rank, smaller logits elsewhere."""
    return torch.tensor([logit if head % 4 == rank else logit / (2 + rank) for head, logit in enumerate(LOGITS)])


@on_ranks(4)
def test_every_layout_equals_clipping_of_whole_weights_with_a_single_collective(rank: int) -> None:
    weights = placed_weights()
    clip = QKClip([layer(tensors, name) for name, tensors in weights.items()])
    for _ in range(2):
        for name in weights:
            if name == "fsdp x tp rows":
                # Tensor parallelism: a rank computes half of the heads.
                half = rank % 2 * HEADS // 2
                clip.observe(name, torch.tensor(LOGITS[half : half + HEADS // 2]), first_head=half)
            else:
                clip.observe(name, observed(rank))
        with CollectiveCounter() as counter:
            clip.start_reduce()
            clip.apply()
        assert [call.payload for call in counter.calls] == [4 * HEADS * len(weights)], "one float32 for each head"
    expected = clipped(clipped(whole_weights(), LOGITS, 100.0, 0.5), LOGITS, 100.0, 0.5)
    for name, tensors in weights.items():
        for key, tensor in tensors.items():
            value = gather(tensor).detach() if isinstance(tensor, DTensor) else tensor
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=0, msg=f"{name}.{key}")


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
