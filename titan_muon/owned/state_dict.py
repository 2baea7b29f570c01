"""Whole tensors on every rank: what `full_tensor()` is for parameters that all ranks have a part of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dtensor import layout_of, local
from ..plan.layout import region
from .private import OwnerMesh


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The whole value of a tensor that is owned, sharded or replicated, on every rank, as a new plain tensor.

    All ranks of the tensor's mesh call it together; for an owned tensor those of the data-parallel mesh that it was
    owned on.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh = tensor.device_mesh
    if not isinstance(mesh, OwnerMesh):
        return tensor.full_tensor().clone()
    placements = tensor.placements[mesh.ndim - (0 if mesh.inner is None else mesh.inner.ndim) :]
    piece = _from_owner(tensor, mesh, _piece_shape(tensor, mesh, placements))
    if mesh.inner is None:
        return piece
    inner = DTensor.from_local(
        piece, mesh.inner, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return inner.full_tensor()


def _piece_shape(tensor: DTensor, mesh: OwnerMesh, placements: Any) -> torch.Size:
    """What the owner of this rank's piece holds: the whole, or a piece of tensor parallelism."""
    if mesh.inner is None:
        return tensor.shape
    cut = DTensor.from_local(
        torch.empty(0), mesh.inner, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    coordinate = mesh.inner.get_coordinate()
    assert coordinate is not None, "this rank is on the mesh of its own piece"
    return torch.Size(sum(stop - start for start, stop in dim) for dim in region(layout_of("", cut), coordinate))


def _from_owner(tensor: DTensor, mesh: OwnerMesh, shape: torch.Size) -> Tensor:
    held = local(tensor)
    axis = mesh.data.ndim - 1
    owns = mesh.data.get_local_rank(axis) == mesh.owner
    piece = held.detach().clone() if owns else torch.empty(shape, dtype=held.dtype, device=held.device)
    if mesh.data.size(axis) > 1:
        dist.broadcast(piece, group=mesh.data.get_group(axis), group_src=mesh.owner)
    return piece


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with every tensor whole, on the host of every rank; all ranks call it together.

    One tensor at a time is whole on the device.
    """
    return {
        name: gather(value).cpu() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()
    }
