"""int8 momentum on FSDP, HSDP, TP, EP, owned and plain replicas; checkpoints reshard without rounding."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.shared import drawn, whole
from titan_muon import Muon, own

SHAPES = {"wide": (24, 128), "tall": (40, 64), "experts": (8, 12, 128)}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "fsdp": ((4,), (Shard(0),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp_tp": ((2, 2), (Shard(0), Shard(0))),
    "ep": ((2, 2), (Replicate(), Shard(0))),
    "fsdp2": ((2,), (Shard(0),)),
}


full = partial(drawn, SHAPES)


def placed(value: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def training(layout: str, world_size: int, **options: Any) -> tuple[nn.Module, Muon]:
    model = nn.Module()
    for name, value in full(0).items():
        if layout in LAYOUTS:
            axes, placements = LAYOUTS[layout]
            value = distribute_tensor(value, init_device_mesh("cpu", axes), placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(value))
    if layout == "owned":
        own(model, mesh=init_device_mesh("cpu", (world_size,)), params=model.parameters())
    options = {"lr": 0.02, "orthogonalize": "reference", **options}
    return model, Muon(model.named_parameters(), state_dtype="int8", **options).build()


def step(model: nn.Module, muon: Muon, seed: int) -> None:
    for name, param in model.named_parameters():
        param.grad = None
        if not isinstance(param, DTensor) or param.to_local().numel():
            param.grad = torch.empty_like(param).copy_(placed(full(seed)[name], param))
    muon.step()


def save(rank: int, world_size: int, layout: str, folder: str) -> dict[str, list[Tensor]]:
    model, muon = training(layout, world_size)
    for seed in (1, 2):
        step(model, muon, seed)
    dcp.save({"optimizer": get_optimizer_state_dict(model, muon)}, checkpoint_id=folder)
    return states(model, muon)


def load(rank: int, world_size: int, layout: str, folder: str) -> dict[str, list[Tensor]]:
    model, muon = training(layout, world_size)
    step(model, muon, 9)
    state = {"optimizer": get_optimizer_state_dict(model, muon)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, muon, state["optimizer"])
    loaded = states(model, muon)
    step(model, muon, 3)
    return loaded


def states(model: nn.Module, muon: Muon) -> dict[str, list[Tensor]]:
    keys = ("momentum_buffer", "momentum_scale")
    return {n: [whole(muon.state[p][key]).clone() for key in keys] for n, p in model.named_parameters()}


def test_a_checkpoint_loads_in_another_layout_and_world_without_rounding(tmp_path: Path) -> None:
    saved = run_ranks(save, 4, "hsdp", str(tmp_path))[0]
    for world_size, layout in ((4, "fsdp"), (4, "fsdp_tp"), (2, "fsdp2"), (1, "plain")):
        loaded = run_ranks(load, world_size, layout, str(tmp_path))[0]
        for name, tensors in saved.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, loaded[name], strict=True)), (layout, name)


def refused(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 96), mesh, [Shard(1)], src_data_rank=None))
    try:
        Muon([("w", param)], state_dtype="int8").build()
    except ValueError as error:
        return str(error)
    return ""


def test_blocks_across_shards_are_refused() -> None:
    for message in run_ranks(refused, 2):
        assert "state_dtype = 'int8'" in message
        assert "w has 96 columns on 2 ranks" in message
