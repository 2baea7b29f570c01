"""The planner's pieces equal DTensor's storage on real meshes, and FSDP2's over tensor parallelism."""

from math import prod
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.dist.harness import on_ranks, run_ranks
from titan_muon.engine.layout.intervals import region
from titan_muon.engine.tensors.dtensor import layout_of

CASES = 60
LARGEST = {1: 30, 2: 20, 3: 9}
MESHES = {4: [(4,), (2, 2), (1, 4), (2, 1, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 2, 2, 2)]}


def drawn_placements(random: Random, ndim: int, mesh: tuple[int, ...]) -> list[Placement]:
    """Random sharded dims of the tensor, some from right to left as in FSDP2."""
    dims = [random.choice([None, *range(ndim)]) for _ in mesh]
    placements: list[Placement] = []
    for axis, dim in enumerate(dims):
        later = zip(mesh[axis + 1 :], dims[axis + 1 :], strict=True)
        factor = prod(size for size, other in later if other == dim)
        if dim is None:
            placements.append(Replicate())
        elif factor > 1 and random.random() < 0.5:
            placements.append(_StridedShard(dim, split_factor=factor))
        else:
            placements.append(Shard(dim))
    return placements


def predicted(tensor: DTensor, full: Tensor, rank: int) -> Tensor:
    """The planner's prediction for this rank's storage."""
    layout = layout_of("w", tensor)
    for dim, intervals in enumerate(region(layout, layout.mesh.coordinates[rank])):
        indices = [i for start, stop in intervals for i in range(start, stop)]
        full = full.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return full


def check_random(rank: int, world_size: int) -> None:
    random = Random(0)
    meshes = {shape: init_device_mesh("cpu", shape) for shape in MESHES[world_size]}
    for _ in range(CASES):
        mesh = random.choice(MESHES[world_size])
        ndim = random.randint(1, 3)
        shape = [random.randint(1, LARGEST[ndim]) for _ in range(ndim)]
        placements = drawn_placements(random, ndim, mesh)
        full = torch.arange(prod(shape)).view(shape)
        tensor = distribute_tensor(full, meshes[mesh], placements, src_data_rank=None)
        assert torch.equal(tensor.to_local(), predicted(tensor, full, rank)), (shape, mesh, placements)
        assert torch.equal(tensor.full_tensor(), full), (shape, mesh, placements)


@pytest.mark.parametrize("world_size", [4, 8])
def test_regions_equal_the_storage_of_dtensor(world_size: int) -> None:
    run_ranks(check_random, world_size)


def over_tensor_parallel(mesh: DeviceMesh, full: Tensor, dim: int) -> DTensor:
    """The parameter of FSDP2 over tensor-parallel shards along `dim`."""
    module = nn.Module()
    cut = distribute_tensor(full.float(), mesh["tp"], [Shard(dim)], src_data_rank=None)
    module.weight = nn.Parameter(cut)
    fully_shard(module, mesh=mesh["dp"])
    weight = module.weight
    assert isinstance(weight, DTensor)
    return weight


@on_ranks(4)
def test_regions_equal_the_storage_of_fsdp_over_tensor_parallelism(rank: int) -> None:
    """On 2 x 2, also where rows are uneven or fewer than ranks. Elements are numbered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in ((8, 8), (13, 8), (3, 4), (7, 6), (1, 8)):
        for dim in (0, 1):
            full = torch.arange(prod(shape)).view(shape)
            weight = over_tensor_parallel(mesh, full, dim)
            assert torch.equal(weight.to_local().detach().long(), predicted(weight, full, rank)), (shape, dim)
