"""Whole values of owned tensors on every rank, and full state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.layout.intervals import chunk
from ..engine.tensors.dtensor import held_indices, local
from ..engine.tensors.process_groups import refuse_reads_outside
from .param import OriginalPlacement, holders, is_owned
from .param_group import OwnedParamGroup
from .private import OwnerMesh


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The whole value of an owned, sharded or replicated tensor on every rank, as a new plain tensor.

    Collective over the tensor's mesh; for an owned tensor over the data-parallel mesh passed to `own`.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh = tensor.device_mesh
    if not isinstance(mesh, OwnerMesh):
        return tensor.full_tensor().clone()
    # Data-parallel ranks first, so that each tensor-parallel rank has its piece.
    axes = 0 if mesh.inner is None else mesh.inner.ndim
    inner = OriginalPlacement(mesh.inner, tuple(tensor.placements[-1 - axes : -1]))
    whole = inner.wrap(_from_owners(tensor, mesh, inner.size(tensor.shape)), tensor)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _from_owners(tensor: DTensor, mesh: OwnerMesh, size: torch.Size) -> Tensor:
    stored, axis = local(tensor), mesh.data.ndim - 1
    whole = stored.new_empty(size)
    for number, owner in enumerate(mesh.owners):
        start, stop = chunk(size[0], len(mesh.owners), number)
        part, is_owner = whole.narrow(0, start, stop - start), mesh.data.get_local_rank(axis) == owner
        if is_owner:
            part.copy_(stored)
        if mesh.data.size(axis) > 1:
            # Each replica has owners.
            dist.broadcast(part, group=mesh.data.get_group(axis), group_src=owner)
    return whole


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with whole tensors on the host of every rank; collective over all ranks."""
    # Tensor by tensor, because the whole model may exceed device memory.
    return {
        name: gather(value).cpu() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()
    }


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load whole tensors into owned, sharded and plain parameters, without communication.

    Every rank passes the whole tensors, on any device, and copies its piece. Raises ValueError for missing or unknown
    names and different shapes, before anything is loaded.
    """
    current = model.state_dict()
    missing, unknown = current.keys() - state_dict.keys(), state_dict.keys() - current.keys()
    if missing or unknown:
        raise ValueError(
            f"the state dict lacks {sorted(missing)[:5]} and has extra {sorted(unknown)[:5]}; load one of this model"
        )
    tensors = {name: value for name, value in current.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if state_dict[name].shape != value.shape:
            raise ValueError(f"{name}: shape {tuple(value.shape)} does not match {tuple(state_dict[name].shape)}")
    for name, value in tensors.items():
        piece = state_dict[name]
        if local(value).numel() == 0:
            continue
        for dim, indices in enumerate(held_indices(value)):
            if len(indices) < piece.size(dim):
                piece = piece.index_select(dim, indices.to(piece.device))
        local(value).copy_(piece)


def register_state_dict_hooks(module: nn.Module, group: OwnedParamGroup) -> None:
    """Make state dicts contain the owned parameters, and raise for reads on ranks without elements."""
    # Every rank would save unsharded parameters, and loaded values would be lost at reshard.
    module.register_state_dict_pre_hook(lambda *_: group.reshard())
    module.register_load_state_dict_pre_hook(lambda *_: group.reshard())
    module.register_state_dict_post_hook(partial(_refuse_in_state_dict, group))


def _refuse_in_state_dict(
    group: OwnedParamGroup, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    # PyTorch's full_state_dict does not read through the entries of the state dict.
    read: list[tuple[str, Any]] = [(param.fqn, param.owned_param) for param in group.params]
    names = [prefix + name for name, _ in module.named_parameters(recurse=False)]
    for fqn, tensor in (*read, *((name, state_dict.get(name)) for name in names)):
        if isinstance(tensor, DTensor) and is_owned(tensor):
            refuse_reads_outside(
                tensor,
                f"{fqn} is stored whole on rank {', '.join(map(str, holders(tensor)))} and this rank has no elements; "
                "read it on all ranks with titan_muon.owned.gather(tensor), and a whole model with "
                "titan_muon.owned.full_state_dict(model)",
            )
