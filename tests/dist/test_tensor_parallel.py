"""The modes of tensor parallelism on gloo: what each of them computes, digit by digit, and what it sends."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceMuon
from titan_muon import Muon

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A mesh, and how a matrix is placed on it; its last axis is that of tensor parallelism."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def cut(self) -> tuple[int, int]:
        """The dim that tensor parallelism cuts, and in how many parts."""
        last = self.placements[-1]
        assert isinstance(last, Shard)
        return last.dim, self.mesh[-1]


CASES = {
    2: {"rows": Case((2,), (Shard(0),)), "columns": Case((2,), (Shard(1),))},
    4: {
        "rows": Case((4,), (Shard(0),)),
        "columns": Case((4,), (Shard(1),)),
        "fsdp_rows": Case((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "fsdp_columns": Case((2, 2), (Shard(0), Shard(1))),
        "replicated_rows": Case((2, 2), (Replicate(), Shard(0))),
    },
}
SHAPES = {"wide": (24, 40), "tall": (40, 24)}


def drawn(names: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def train(world_size: int, **options: Any) -> tuple[Muon, dict[str, Any]]:
    """Two steps of all cases of a world in one optimizer."""
    shapes = {f"{case}.{name}": shape for case in CASES[world_size] for name, shape in SHAPES.items()}
    meshes = {}
    for name, case in CASES[world_size].items():
        names = ("fsdp", "tp")[-len(case.mesh) :]
        meshes[name] = init_device_mesh("cpu", case.mesh, mesh_dim_names=names), case.placements

    def placed(key: str, full: Tensor) -> DTensor:
        return distribute_tensor(full.clone(), *meshes[key.partition(".")[0]], src_data_rank=None)

    params = {key: nn.Parameter(placed(key, full)) for key, full in drawn(shapes, 0).items()}
    optimizer = Muon(list(params.items()), lr=0.02, **options)
    for step in range(STEPS):
        for key, full in drawn(shapes, step + 1).items():
            params[key].grad = placed(key, full)
        optimizer.step()
    return optimizer, params


def train_in_blocks(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What is not the reference of parameters that are blocks, bit for bit; and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, params = train(world_size, tensor_parallel="blockwise", orthogonalize="reference")
    different = []
    for key, param in params.items():
        dim, count = CASES[world_size][key.partition(".")[0]].cut
        full = [drawn({k: SHAPES[k.partition(".")[2]] for k in params}, seed)[key] for seed in range(STEPS + 1)]
        initial, *grads = [dict(enumerate(one.chunk(count, dim))) for one in full]
        reference = ReferenceMuon({str(place): block.clone() for place, block in initial.items()})
        for grad in grads:
            reference.step({str(place): block.clone() for place, block in grad.items()})
        if not torch.equal(param.full_tensor(), torch.cat(list(reference.params.values()), dim)):
            different.append(key)
    return different, [str(one.message) for one in said if "blockwise" in str(one.message)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_blocks_are_matrices_of_their_own_bit_for_bit_and_muon_says_so(world_size: int) -> None:
    for different, said in run_ranks(train_in_blocks, world_size, timeout=SECONDS):
        assert different == []
        assert len(said) == 1
        count = len(SHAPES) * len(CASES[world_size])
        assert f"'blockwise' is inexact: of {count} matrices that tensor parallelism cuts" in said[0]
