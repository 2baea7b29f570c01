"""Rows that a rank stores of a parameter, for a framework whose placements do not tell them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..engine.layout.intervals import region
from ..engine.tensors.dtensor import CHUNKS, ITEMS, layout_on, local


def set_rows(tensor: DTensor, start: int) -> None:
    """Let this rank's part of a DTensor begin at row `start`, for Muon and for torch.distributed.checkpoint."""
    coordinate, stored = tensor.device_mesh.get_coordinate(), local(tensor)
    if coordinate is not None:
        layout = layout_on("", tensor.shape, tensor.device_mesh, tensor.placements, by_rows=True)
        others = region(layout, coordinate)[1:]
        offsets = (start, *([*dim, (0, 0)][0][0] for dim in others))
        part = ChunkStorageMetadata(torch.Size(offsets), stored.shape)
        # Not closures, because the tensor may be pickled.
        setattr(stored, CHUNKS, partial(_parts, part))
        setattr(stored, ITEMS, partial(_write_items, part))


def _parts(part: Any) -> list[Any]:
    return [part]


def _write_items(part: Any, fqn: str, tensor: DTensor) -> list[Any]:
    if part.sizes.numel() == 0:
        return []
    data = TensorWriteData(part, TensorProperties.create_from_tensor(local(tensor)), tensor.size())
    return [WriteItem(MetadataIndex(fqn, part.offsets), WriteItemType.SHARD, tensor_data=data)]
