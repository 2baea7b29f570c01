"""Whole tensors on every rank, of any placement: what `full_tensor()` is for parameters that all ranks share."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..layouts import layout_of, local
from ..plan.layout import Intervals, region


@torch.no_grad()
def gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole value of a tensor, on every rank, as a new plain tensor.

    Args:
        tensor: owned, sharded or replicated. Every rank of `group` has it, with or without elements.
        group: ranks that call this together, all holders among them; by default all ranks.

    Raises ValueError for a tensor that is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    layout = layout_of("the tensor", tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local(tensor).device)
    done: set[tuple[Intervals, ...]] = set()
    for position, rank in enumerate(layout.mesh.ranks):
        piece = region(layout, layout.mesh.coordinate(position))
        if piece not in done:
            done.add(piece)
            _send(tensor, rank, piece, whole, group)
    return whole


def _send(tensor: DTensor, rank: int, piece: tuple[Intervals, ...], whole: Tensor, group: Any) -> None:
    """Bring the piece that `rank` holds to all ranks, and to its place in `whole`."""
    shape = [sum(stop - start for start, stop in dim) for dim in piece]
    if 0 in shape:
        return
    mine = dist.get_rank() == rank
    received = local(tensor).detach().contiguous() if mine else whole.new_empty(shape)
    if dist.get_world_size(group) > 1:
        dist.broadcast(received, src=rank, group=group)
    for intervals in product(*piece):
        place = tuple(slice(start, stop) for start, stop in intervals)
        whole[place] = received[tuple(_within(dim, interval) for dim, interval in zip(piece, intervals, strict=True))]


def _within(stored: Intervals, interval: tuple[int, int]) -> slice:
    """Where an interval of a dim is in storage that has several of them one after the other."""
    start = sum(stop - begin for begin, stop in stored if stop <= interval[0])
    return slice(start, start + interval[1] - interval[0])


def full_state_dict(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The state dict of a model with every tensor whole, on the host, on every rank of `group`; called by all of them.

    One tensor at a time is whole on the device.
    """
    return {
        name: gather(value, group).cpu() if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }
