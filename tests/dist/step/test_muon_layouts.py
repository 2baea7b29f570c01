"""Muon on any layout and exchange is single-process Muon on the full matrices, bit for bit, momentum included."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.dist.harness import run_ranks
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn
from titan_muon import Muon

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A mesh of the world's ranks, and the placement of tensors."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]


MATRICES = {"wide": (24, 40), "tall": (40, 24), "uneven": (13, 18), "short": (3, 16)}
EXPERTS = {"experts": (8, 12, 20), "few": (3, 10, 14)}

CASES = {
    2: [
        Case("fsdp", (2,), (Shard(0),)),
        Case("tp_columns", (2,), (Shard(1),)),
        Case("ddp", (2,), (Replicate(),)),
    ],
    4: [
        Case("fsdp", (4,), (Shard(0),)),
        Case("hsdp", (2, 2), (Replicate(), Shard(0))),
        Case("fsdp_tp_rows", (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        Case("fsdp_tp_columns", (2, 2), (Shard(0), Shard(1))),
        Case("fsdp_tp_replicated", (2, 2), (Shard(0), Replicate())),
    ],
    8: [
        Case("fsdp", (8,), (Shard(0),)),
        Case("hsdp_tp", (2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    ],
}
EXPERT_CASES = {
    2: [Case("ep", (2,), (Shard(0),))],
    4: [
        Case("ep_efsdp", (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        Case("ep_efsdp_rows", (2, 2), (Shard(1), Shard(0))),
        Case("tp_ep", (2, 2), (Shard(2), Shard(0))),
        Case("hsdp_ep", (2, 2), (Replicate(), Shard(0))),
    ],
    8: [Case("replicate_efsdp_ep", (2, 2, 2), (Replicate(), Shard(1), Shard(0)))],
}


def check_cases(rank: int, world_size: int, exchange: str, options: dict[str, object]) -> list[str]:
    """Train all cases of this world in one optimizer; names with a difference from the reference."""
    params: dict[str, nn.Parameter] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    placed: dict[str, tuple[object, tuple[Placement, ...]]] = {}
    for cases, tensors in ((CASES, MATRICES), (EXPERT_CASES, EXPERTS)):
        for case in cases[world_size]:
            mesh = init_device_mesh("cpu", case.mesh)
            for name, shape in tensors.items():
                key = f"{case.name}.{name}"
                shapes[key], placed[key] = shape, (mesh, case.placements)
    initial = drawn(shapes, seed=0)
    for key, full in initial.items():
        mesh, placements = placed[key]
        params[key] = nn.Parameter(distribute_tensor(full.clone(), mesh, placements, src_data_rank=None))
    reference = ReferenceMuon({key: full.clone() for key, full in initial.items()}, **options)
    optimizer = Muon(list(params.items()), lr=0.02, exchange=exchange, orthogonalize="reference", **options)
    for step in range(STEPS):
        grads = drawn(shapes, seed=step + 1)
        for key, param in params.items():
            mesh, placements = placed[key]
            param.grad = distribute_tensor(grads[key].clone(), mesh, placements, src_data_rank=None)
        optimizer.step()
        reference.step(grads)
    different = []
    for key, param in params.items():
        average = optimizer.state[param]["momentum_buffer"]
        assert isinstance(average, DTensor)
        mesh, placements = placed[key]
        expected = distribute_tensor(reference.params[key], mesh, placements, src_data_rank=None)
        momentum = distribute_tensor(reference.average[key], mesh, placements, src_data_rank=None)
        if not torch.equal(param.to_local(), expected.to_local()):
            different.append(f"{key}: parameter")
        if not torch.equal(average.to_local(), momentum.to_local()):
            different.append(f"{key}: momentum")
    return different


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "all_gather_reduce_scatter"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_layout_equals_the_reference_bit_for_bit(world_size: int, exchange: str) -> None:
    assert run_ranks(check_cases, world_size, exchange, {}) == [[]] * world_size
