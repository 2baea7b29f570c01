"""One optimizer for layers under FSDP2 and layers under FSDP2 with tensor parallelism: norms and checkpoints.

Bits: tests/parity.
"""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.harness import run_ranks
from tests.shared import message, whole
from tests.unit.test_hybrid import OPTIONS, Decoder
from titan_muon import Hybrid, Muon, clip_grad_norm_

AXES = {2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}
"""Axes of a mesh by number."""


def sharded(mesh: DeviceMesh, seed: int = 0) -> Decoder:
    """The second layer with tensor parallelism, and everything with FSDP2 over the other axes."""
    model, data = Decoder(seed), mesh[AXES[len(mesh.shape)][:-1]]
    parallelize_module(model.layers[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


def backward(model: nn.Module, mesh: DeviceMesh, step: int) -> None:
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank(0)))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param).detach().clone() for name, param in model.named_parameters()}


def differing(mine: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in other if not torch.equal(mine[name], other[name])]


def trained(rank: int, world_size: int, shape: tuple[int, ...], folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    model = sharded(mesh)
    hybrid = Hybrid(model, **OPTIONS)
    named = dict(model.named_parameters())
    norms = []
    for step in range(4):
        backward(model, mesh, step)
        grads = {name: whole(param.grad).clone() for name, param in named.items() if param.grad is not None}
        norms.append((float(clip_grad_norm_(named.values(), 0.5)), float(nn.utils.get_total_norm(grads.values()))))
        hybrid.step()
        hybrid.zero_grad()
        if step == 1:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, hybrid), strict=True))
            dcp.save(states, checkpoint_id=folder)
            hybrid.rebuild()
    other = sharded(mesh, seed=1)
    resumed = Hybrid(other, **OPTIONS)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for step in (2, 3):
        backward(other, mesh, step)
        clip_grad_norm_(other.parameters(), 0.5)
        resumed.step()
        resumed.zero_grad()
    hybrid.check_replicas()
    return {
        "resumed": differing(weights(model), weights(other)),
        "norms": norms,
        "reason": hybrid.optimizers["muon"].plan.reason,
    }


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=str)
def test_an_optimizer_trains_layers_on_several_meshes(shape: tuple[int, ...], tmp_path: Path) -> None:
    ranks = prod(shape)
    for result in run_ranks(trained, ranks, shape, str(tmp_path)):
        assert result["resumed"] == []
        for ours, expected in result["norms"]:
            assert ours == pytest.approx(expected, rel=1e-5)
        assert "layers.0.up.weight, layers.0.down.weight: separate tensors on separate meshes" in result["reason"]


def refused(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES[2])
    placement = Shard(0) if mesh.get_local_rank("tp") == 0 else Replicate()
    params = {
        "a": distribute_tensor(torch.ones(16, 16), mesh, [Shard(0), Shard(0)]),
        "b": distribute_tensor(torch.ones(16, 16), mesh["dp"], [placement]),
    }
    return message(Muon([(name, nn.Parameter(param)) for name, param in params.items()]).build)


def test_a_parameter_placed_differently_on_two_meshes_is_refused_on_every_rank() -> None:
    for text in run_ranks(refused, 4):
        assert text.startswith("b: has shape (16, 16) and placements (Shard(dim=0),) on mesh Mesh(shape=(2,), ranks=(0")
        assert "placements (Replicate(),) on mesh Mesh(shape=(2,), ranks=(1, 3)); build a Muon for each mesh" in text
