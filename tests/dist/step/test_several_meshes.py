"""One Muon for layers under FSDP2 and layers under FSDP2 with tensor parallelism. Bits and states: tests/parity."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.shared import message
from titan_muon import Muon


def placed_differently(rank: int, world_size: int) -> tuple[str, str]:
    """The reason in the plan of a parameter on each of two meshes, and the error if its placement differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, kinds = torch.ones(16, 16), [Shard(0), Shard(0) if mesh.get_local_rank("tp") == 0 else Replicate()]
    joint = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
    muons = [Muon([("a", joint), ("b", nn.Parameter(distribute_tensor(whole, mesh["dp"], [kind])))]) for kind in kinds]
    return muons[0].plan.reason, message(muons[1].build)


def test_separate_tensors_on_two_meshes_are_named_and_different_placements_are_refused_on_every_rank() -> None:
    for reason, text in run_ranks(placed_differently, 4):
        assert "b: separate tensors on separate meshes" in reason
        assert text.startswith("b: has shape (16, 16) and placements (Shard(dim=0),) on mesh Mesh(shape=(2,), ranks=(0")
        assert "placements (Replicate(),) on mesh Mesh(shape=(2,), ranks=(1, 3)); build a Muon for each mesh" in text
