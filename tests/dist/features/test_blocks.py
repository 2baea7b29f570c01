"""Steps on blocks: a fault in one raises in the next step, and ranks compare the plan of blocks."""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.shared import local, message
from titan_muon import Expert, Muon

MODES: tuple[Literal["distributed", "blockwise"], ...] = ("distributed", "blockwise")


def _refused(world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 24), mesh, [Shard(0)]))
    experts = [*(Expert(whole_freq=2, tp_mode=mode) for mode in MODES), Expert(whole_freq=2, split_over=2)]
    return [message(Muon([("w", param)], expert=expert).build) for expert in experts]


def _spoiled(rank: int, world_size: int) -> tuple[str, bool, str, list[str]]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 24), mesh, [Shard(0)]))
    muon = Muon([("w", param)], expert=Expert(whole_freq=2))
    for value in (1.0, torch.nan):
        grad = torch.ones(16, 24)
        grad[-1, -1] = value
        param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        muon.step()
    assert muon.plan.digest() != replace(muon.plan, blocks=None).digest()
    return muon.plan.reason, bool(local(param).isfinite().all()), message(muon.step), _refused(world_size)


def test_a_fault_in_a_step_on_blocks_raises_in_the_next_one_on_every_rank_and_modes_of_tp_are_refused() -> None:
    for reason, finite, error, refused in run_ranks(_spoiled, 2):
        assert "every 2 steps; in the others, each rank orthogonalizes what it stores" in reason
        assert finite
        assert "w" in error
        assert "not finite" in error
        for name, text in zip((*(f"tp_mode = {mode!r}" for mode in MODES), "split_over = 2"), refused, strict=True):
            assert f"{name} excludes whole_freq" in text
