"""Hybrid under DDP, FSDP2 and FSDP2 with tensor parallelism: as one process, however its parameters come to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.dist.harness import run_ranks
from tests.unit.test_hybrid import OPTIONS, Decoder
from titan_muon import Hybrid, clip_grad_norm_


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def prepared(layout: str, model: Decoder) -> tuple[nn.Module, Hybrid]:
    """The model in a layout, and its optimizer."""
    if layout == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, Hybrid(wrapped, **OPTIONS)
    if layout == "fsdp":
        shard(model)
        return model, Hybrid(model, **OPTIONS)
    # As Accelerate's `prepare` does it: shard after the optimizer was made, then put new parameters into its groups.
    hybrid = Hybrid(model, **OPTIONS)
    shard(model)
    named = dict(model.named_parameters())
    for group in hybrid.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    return model, hybrid


def train(model: nn.Module, hybrid: Hybrid, steps: range, max_norm: float = 1.0) -> None:
    """Steps on the same tokens on every rank, so that mean gradients are those of one process."""
    for step in steps:
        tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm)
        hybrid.step()
        hybrid.zero_grad()


def weights(model: nn.Module) -> list[Any]:
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [weight.detach().numpy() for weight in full]


def on_ranks(rank: int, world_size: int, layout: str, folder: str) -> tuple[list[Any], bool]:
    """Weights after five steps, and whether a run that resumed after three has the same bits."""
    model, hybrid = prepared(layout, Decoder())
    train(model, hybrid, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, hybrid), strict=True))
    dcp.save(states, checkpoint_id=folder)
    train(model, hybrid, range(3, 5))
    other, resumed = prepared(layout, Decoder(seed=1))
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(other, resumed, range(3, 5))
    final, again = weights(model), weights(other)
    return final, all((a == b).all() for a, b in zip(final, again, strict=True))


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "swapped"])
def test_ranks_train_as_one_process_and_resume_with_the_same_bits(layout: str, tmp_path: Path) -> None:
    model = Decoder()
    train(model, Hybrid(model, **OPTIONS), range(5))
    for final, resumed in run_ranks(on_ranks, 2, layout, str(tmp_path)):
        for found, expected in zip(final, weights(model), strict=True):
            # Five updates of about 0.02 each. Newton-Schulz in bfloat16 magnifies differences of the last bits.
            torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=0, atol=2e-3)
        assert resumed
