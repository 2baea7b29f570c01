"""A few small parameters with rows over the ranks of a mesh, for tests of a single optimizer."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

SECONDS = 30.0
"""A longer run hangs."""

SHAPES = {"layers.0.weight": (16, 24), "layers.1.weight": (24, 16), "layers.2.experts": (4, 8, 12)}
INITIAL = 0
"""Seed of the parameters' values."""


def full(name: str, seed: int) -> Tensor:
    """The whole value or gradient of a parameter; gradients have seeds from 1."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name)))


def placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement | None = None) -> DTensor:
    """A whole tensor as a DTensor, in rows unless told otherwise."""
    return distribute_tensor(tensor, mesh, [Shard(0) if placement is None else placement], src_data_rank=None)


def parameters(mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Fresh parameters, with the gradients of seed 1."""
    params = {name: nn.Parameter(placed(full(name, INITIAL), mesh)) for name in SHAPES}
    set_gradients(params, mesh, 1)
    return params


def set_gradients(params: dict[str, nn.Parameter], mesh: DeviceMesh, seed: int) -> None:
    """Set the gradient of a seed for each parameter."""
    for name, param in params.items():
        param.grad = placed(full(name, seed), mesh)


def named(params: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) pairs for an optimizer."""
    return list(params.items())
