"""Meshes without process groups."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from titan_muon.engine.tensors.dtensor import from_local
from titan_muon.engine.tensors.process_groups import StateMesh, fake_world


def test_an_operator_keeps_a_mesh_without_groups_after_the_same_operator_on_equal_ranks() -> None:
    with fake_world(2):
        whole, piece = torch.empty(4, 3, device="meta"), torch.ones(2, 3)
        plain = from_local(piece, init_device_mesh("cpu", (2,)), [Shard(0)], whole)
        kept = from_local(piece, StateMesh("cpu", torch.arange(2)), [Shard(0)], whole)
        assert torch.zeros_like(plain).device_mesh is plain.device_mesh
        assert torch.zeros_like(kept).device_mesh is kept.device_mesh
