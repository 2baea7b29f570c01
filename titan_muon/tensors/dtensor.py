"""Between PyTorch's tensors and the planner's data: layouts of DTensors and plain tensors, and their local storage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..plan.terms import types
from ..plan.terms.layout import region

TENSOR_PARALLEL = "tp"
"""The mesh axis of tensor parallelism, by the name that PyTorch's examples and TorchTitan give it."""


def layout_of(fqn: str, tensor: Tensor) -> types.Layout:
    """How a parameter rests. A plain tensor rests whole on every rank of the default group.

    Raises ValueError for a placement that Muon cannot read (a partial sum).
    """
    if not isinstance(tensor, DTensor):
        world = dist.get_world_size() if dist.is_initialized() else 1
        mesh = types.Mesh((world,), tuple(range(world)))
        return types.Layout(tuple(tensor.shape), mesh, (types.Replicate(),))
    return layout_on(fqn, tensor.shape, tensor.device_mesh, tensor.placements)


def layout_on(fqn: str, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> types.Layout:
    """How a tensor of some shape rests on a mesh. Raises ValueError as `layout_of` does."""
    ranks = types.Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    placed = tuple(_placement(fqn, p) for p in placements)
    return types.Layout(tuple(shape), ranks, placed, _tensor_parallel(mesh.mesh_dim_names or (), ranks, placed))


def _tensor_parallel(names: Sequence[str], mesh: types.Mesh, placements: Sequence[types.Placement]) -> int | None:
    """The axis of tensor parallelism, if it cuts a tensor that is placed so."""
    if TENSOR_PARALLEL not in names:
        return None
    axis = names.index(TENSOR_PARALLEL)
    return axis if mesh.shape[axis] > 1 and not isinstance(placements[axis], types.Replicate) else None


def _placement(fqn: str, placement: Placement) -> types.Placement:
    # _StridedShard is a subclass of Shard in some versions of PyTorch and not in others.
    if isinstance(placement, _StridedShard):
        return types.StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return types.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return types.Replicate()
    raise ValueError(f"{fqn}: Muon cannot read a parameter placed as {placement}; reduce it first")


def mesh_axes(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """The ranks of each process group that a DTensor's mesh has, in the order of the group; none of a plain tensor."""
    # Subclasses of DeviceMesh (owned placement's) have no groups. Groups order their ranks, so an axis that descends
    # would be another group than the mesh says.
    if isinstance(tensor, DTensor) and type(tensor.device_mesh) is DeviceMesh:
        ranks = tensor.device_mesh.mesh
        for axis in range(ranks.ndim):
            for line in ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist():
                if len(line) > 1 and line == sorted(line):
                    yield tuple(line)


def mesh_groups(tensor: Tensor, rank: int) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Those of the process groups that `rank`, this process, is a member of."""
    mine = {axis for axis in mesh_axes(tensor) if rank in axis}
    if not (mine and isinstance(tensor, DTensor)):
        return {}
    groups = [tensor.device_mesh.get_group(axis) for axis in range(tensor.device_mesh.ndim)]
    found = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return {ranks: group for ranks, group in found.items() if ranks in mine}


def local(tensor: Tensor) -> Tensor:
    """This rank's storage of a DTensor, or a plain tensor itself; for the same tensor the same object."""
    # Private. `to_local()` of a Parameter makes a new view each time, whose identity says nothing and which takes
    # longer than all else that the host does for a parameter in a step.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_device(tensor: Tensor) -> torch.device:
    """Device of a tensor's storage; on a rank outside of its mesh, the device that it has on the others."""
    # There the local tensor is empty, and DTensor's operators make it on the CPU whatever the mesh is of.
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return _mesh_device(tensor)
    return local(tensor).device


def step_device(tensor: Tensor) -> torch.device:
    """Device on which a parameter is updated: that of its mesh, whose storage FSDP may keep on the host, or its own."""
    stored = storage_device(tensor)
    return _mesh_device(tensor) if isinstance(tensor, DTensor) and stored.type == "cpu" else stored


def _mesh_device(tensor: DTensor) -> torch.device:
    kind = tensor.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def held_indices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Along each dim, the indices of the whole tensor whose elements this rank holds, in the order of its storage.

    On the CPU, whatever the tensor is on; empty for a rank that is not on the tensor's mesh.
    """
    if not isinstance(tensor, DTensor):
        return tuple(torch.arange(size, device="cpu") for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    empty = torch.arange(0, device="cpu")
    if coordinate is None:
        return tuple(empty for _ in tensor.shape)
    dims = region(layout_of("", tensor), coordinate)
    return tuple(torch.cat([empty, *(torch.arange(a, b, device="cpu") for a, b in dim)]) for dim in dims)


def layer_of(fqn: str) -> str:
    """The layer that a parameter is part of: its name up to the first number, or all but the last word of it."""
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", fqn)
    return numbered.group() if numbered else fqn.rpartition(".")[0]
