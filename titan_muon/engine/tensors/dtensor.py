"""Properties of DTensors, plain tensors and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..layout import types
from ..layout.intervals import region
from .process_groups import ranks_of

CHUNKS = "__create_chunk_list__"
"""Attribute of a local tensor with its place, see [Note: rows]."""


def layout_of(fqn: str, tensor: Tensor, ranks: Sequence[int] | None = None) -> types.Layout:
    """The layout of a parameter. A plain tensor is replicated on `ranks`, by default all.

    Raises ValueError for a partial sum.
    """
    if not isinstance(tensor, DTensor):
        replicas = ranks_of(None) if ranks is None else tuple(ranks)
        mesh = types.Mesh((len(replicas),), replicas)
        return types.Layout(tuple(tensor.shape), mesh, (types.Replicate(),))
    by_rows = hasattr(local(tensor), CHUNKS)
    return layout_on(fqn, tensor.shape, tensor.device_mesh, tensor.placements, by_rows=by_rows)


def layout_on(
    fqn: str, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], *, by_rows: bool = False
) -> types.Layout:
    """As `layout_of`, for a tensor of this shape on a mesh. `by_rows`: whether `set_rows` tells the rows."""
    ranks = types.Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    placed = tuple(_placement(fqn, p, by_rows=by_rows) for p in placements)
    return types.Layout(tuple(shape), ranks, placed)


def planned(fqn: str, tensor: Tensor, stack: types.MatrixStack, layout: types.Layout | None = None) -> types.Parameter:
    """The planner's record of a parameter, by default with its own layout."""
    layout = layout_of(fqn, tensor) if layout is None else layout
    return types.Parameter(fqn, layer_of(fqn), layout, stack, not isinstance(tensor, DTensor))


def _placement(fqn: str, placement: Placement, *, by_rows: bool) -> types.Placement:
    # First, because some versions of PyTorch derive _StridedShard from Shard.
    if isinstance(placement, _StridedShard):
        return types.StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return types.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return types.Replicate()
    if placement.is_partial():
        raise ValueError(f"{fqn}: Muon cannot read a parameter placed as {placement}; reduce the parameter first")
    if not by_rows:
        raise ValueError(
            f"{fqn}: Muon cannot read a parameter placed as {placement}; if its ranks store whole rows, call "
            "titan_muon.engine.tensors.dtensor.set_rows(parameter, first_row) on each, or else shard it by fully_shard"
        )
    return types.Shard(0)


def mesh_axes(tensor: Tensor, layout: types.Layout) -> Iterator[tuple[int, ...]]:
    """The ranks of each process group of a DTensor's meshes, in group order; nothing for a plain tensor."""
    # Subclasses of DeviceMesh have no process groups. PyTorch sorts the ranks of a group, so skip descending axes.
    if isinstance(tensor, DTensor) and type(tensor.device_mesh) is DeviceMesh:
        ranks = torch.tensor(layout.mesh.ranks, device="cpu").view(layout.mesh.shape)
        for axis, placement in enumerate(layout.placements):
            for members in ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist():
                if len(members) > 1 and members == sorted(members) and placement != types.Separate():
                    yield tuple(members)


def mesh_groups(tensor: Tensor, rank: int) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The process groups of this rank from `mesh_axes`, by their ranks."""
    mine = {axis for axis in mesh_axes(tensor, layout_of("", tensor)) if rank in axis}
    if not (mine and isinstance(tensor, DTensor)):
        return {}
    groups = [tensor.device_mesh.get_group(axis) for axis in range(tensor.device_mesh.ndim)]
    by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return {ranks: group for ranks, group in by_ranks.items() if ranks in mine}


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the plain tensor; the same object in every call."""
    # `to_local()` of a Parameter makes a new view, which takes host time.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def from_local(piece: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    """A DTensor with the shape of `like`, without communication."""
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def storage_device(tensor: Tensor) -> torch.device:
    """Device of a tensor's storage."""
    # Outside of the mesh the local tensor is empty, and maybe on the CPU.
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return current_device(tensor.device_mesh.device_type)
    return local(tensor).device


def step_device(tensor: Tensor) -> torch.device:
    """Device that updates a parameter: the storage's, or the mesh's if FSDP keeps the storage on the host."""
    stored = storage_device(tensor)
    if isinstance(tensor, DTensor) and is_host(stored):
        return current_device(tensor.device_mesh.device_type)
    return stored


def held_indices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Global indices of this rank's elements by dim, on the CPU."""
    if not isinstance(tensor, DTensor):
        return tuple(torch.arange(size, device="cpu") for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    empty = torch.arange(0, device="cpu")
    if coordinate is None:
        return tuple(empty for _ in tensor.shape)
    dims, rows = region(layout_of("", tensor), coordinate), own_rows(tensor)
    dims = dims if rows is None else ((rows,), *dims[1:])
    return tuple(torch.cat([empty, *(torch.arange(a, b, device="cpu") for a, b in dim)]) for dim in dims)


# [Note: rows]
# - Megatron-FSDP cuts a buffer of several parameters into equal parts. So a rank has any range of a parameter's rows
#   (indices of dim 0), also an empty one, and placements do not tell the range.
# - `set_rows` sets a range on the local tensor, where torch.distributed.checkpoint reads the place of a part. A plan
#   has the ranges of all ranks (`Layout.rows`).


def own_rows(tensor: Tensor) -> types.Interval | None:
    """This rank's range of dim 0 as `set_rows` has set it; None if the placements tell the range."""
    chunks = getattr(local(tensor), CHUNKS, None)
    if chunks is None or not isinstance(tensor, DTensor):
        return None
    # Placements of other packages, as ragged shards, need not have a single `dim`.
    if not any(not p.is_replicate() and getattr(p, "dim", 0) == 0 for p in tensor.placements):
        return None
    start = chunks()[0].offsets[0]
    return types.Interval(start, start + local(tensor).size(0))


def set_rows(tensor: DTensor, start: int) -> None:
    """Let this rank's part of a DTensor begin at row `start`, for Muon and for torch.distributed.checkpoint."""
    # The import takes long, and other layouts need none of it.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    coordinate, stored = tensor.device_mesh.get_coordinate(), local(tensor)
    if coordinate is not None:
        layout = layout_on("", tensor.shape, tensor.device_mesh, tensor.placements, by_rows=True)
        others = region(layout, coordinate)[1:]
        offsets = (start, *([*dim, (0, 0)][0][0] for dim in others))
        part = ChunkStorageMetadata(torch.Size(offsets), stored.shape)
        # Not closures, because the tensor may be pickled.
        stored.__create_chunk_list__ = partial(_parts, part)  # type: ignore[attr-defined]
        stored.__create_write_items__ = partial(_write_items, part)  # type: ignore[attr-defined]


def copy_rows(source: Tensor, target: Tensor) -> None:
    """Set the rows of a state like those of its parameter, if the parameter has any set."""
    if isinstance(target, DTensor) and (rows := own_rows(source)) is not None:
        set_rows(target, rows.start)


def _parts(part: Any) -> list[Any]:
    return [part]


def _write_items(part: Any, fqn: str, tensor: DTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if part.sizes.numel() == 0:
        return []
    data = TensorWriteData(part, TensorProperties.create_from_tensor(local(tensor)), tensor.size())
    return [WriteItem(MetadataIndex(fqn, part.offsets), WriteItemType.SHARD, tensor_data=data)]


def layer_of(fqn: str) -> str:
    """The layer of a parameter: the name up to the first number, or without the last word."""
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", fqn)
    return numbered.group() if numbered else fqn.rpartition(".")[0]


def is_host(device: torch.device) -> bool:
    """Whether the host computes on the device, so that reading a tensor does not wait, and copies need no pinning."""
    return device.type == "cpu"


def current_device(kind: str) -> torch.device:
    """This process's device of a type."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without a wait of the host."""
    return tensor if is_host(device) else tensor.pin_memory().to(device, non_blocking=True)


def host_zeros(like: Tensor) -> Tensor:
    """Host memory for copies of a tensor; pinned for a device, so that copies do not wait."""
    return torch.zeros_like(like, device="cpu", pin_memory=not is_host(like.device))


def may_be_true(flags: Tensor) -> bool:
    """Whether a flag is true, or unknown because reading the device would wait."""
    return not is_host(flags.device) or bool(flags.any())
