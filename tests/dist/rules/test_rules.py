"""Algorithms with a state of whole matrices refuse matrices without an owner of the whole."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks
from titan_muon import Muon


def refusal(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    param = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)], src_data_rank=None))
    messages = []
    for mode in ("distributed", "blockwise"):
        try:
            Muon([("w", param)], algorithm="normuon", tensor_parallel=mode).build()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_normuon_refuses_a_matrix_without_an_owner_of_the_whole() -> None:
    for messages in run_ranks(refusal, 2):
        assert len(messages) == 2
        assert all("algorithm = 'normuon' needs whole matrices" in text for text in messages)
