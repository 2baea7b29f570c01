"""int8 momentum: checkpoints reshard without rounding. Training: tests/parity."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.parity.checkpoints import load, saved
from tests.parity.table import row
from tests.parity.training import Training
from tests.shared import message, whole
from titan_muon import Muon


def training(world_size: int, layout: str, *seeds: int) -> Training:
    """A training after steps with the gradients of `seeds`."""
    made = Training(
        row("int8", world_size, (layout,), shapes=("wide", "uneven", "experts"), math={"state_dtype": "int8"})
    )
    for seed in seeds:
        made.step_on(seed)
    return made


def states(made: Training) -> dict[str, list[Tensor]]:
    keys = ("momentum_buffer", "momentum_scale")
    return {name: [whole(made.muon.state[param][key]).clone() for key in keys] for name, param in made.params.items()}


def save(rank: int, world_size: int, layout: str, folder: str) -> dict[str, list[Tensor]]:
    made = training(world_size, layout, 1, 2)
    dcp.save(saved(made, False), checkpoint_id=folder)
    return states(made)


def loaded(rank: int, world_size: int, layout: str, folder: str) -> dict[str, list[Tensor]]:
    made = training(world_size, layout, 9)
    state = saved(made, False)
    dcp.load(state, checkpoint_id=folder)
    load(made, False, state)
    return states(made)


def test_a_checkpoint_loads_in_another_layout_and_world_without_rounding(tmp_path: Path) -> None:
    expected = run_ranks(save, 4, "hsdp", str(tmp_path))[0]
    for world_size, layout in ((4, "fsdp x tp rows"), (2, "fsdp"), (1, "plain")):
        found = run_ranks(loaded, world_size, layout, str(tmp_path))[0]
        for name, tensors in expected.items():
            assert all(map(torch.equal, tensors, found[name])), (layout, name)


def refused(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 96), mesh, [Shard(1)], src_data_rank=None))
    return message(Muon([("w", param)], state_dtype="int8").build)


def test_blocks_across_shards_are_refused() -> None:
    for text in run_ranks(refused, 2):
        assert "state_dtype = 'int8'" in text
        assert "w has 96 columns on 2 ranks" in text
