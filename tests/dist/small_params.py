"""A few small parameters with rows over all ranks, for tests of a single optimizer."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SECONDS = 30.0
"""A longer run hangs."""
SHAPES = {"layers.0.weight": (16, 24), "layers.1.weight": (24, 16), "layers.2.experts": (4, 8, 12)}


def full(name: str, seed: int) -> Tensor:
    """The whole value (seed 0) or gradient (seeds from 1) of a parameter."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name)))


def placed(tensor: Tensor, mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """A whole tensor, sharded along a dim over a mesh, by default of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)


def parameters() -> dict[str, nn.Parameter]:
    """Fresh parameters, with the gradients of seed 1."""
    params = {name: nn.Parameter(placed(full(name, 0))) for name in SHAPES}
    set_gradients(params, 1)
    return params


def set_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    for name, param in params.items():
        param.grad = placed(full(name, seed))
