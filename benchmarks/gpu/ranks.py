"""A rank of a part: device, process group, and GPU-only records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from titan_muon.comm.exchange import Collectives


def begin(device: str) -> torch.device:
    """Join the processes of torchrun. Returns this rank's device.

    `cuda`: over NCCL; over gloo if ranks share a GPU, which NCCL refuses. `cpu`: over gloo.
    """
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:gloo")
        # gloo's direct sends, and its gather for DTensor, read the memory of a GPU on the host, and crash.
        Collectives.all_gather_uneven = _broadcasts  # type: ignore[method-assign]
        DTensor.full_tensor = full_through_the_host  # type: ignore[method-assign]
        return torch.device("cuda", 0)
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine)
    return mine


def _broadcasts(self: Collectives, parts: list[Tensor], input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """`Collectives.all_gather_uneven` by broadcasts."""
    parts[dist.get_rank(group)].copy_(input)
    sources = [(rank, part) for rank, part in enumerate(parts) if part.numel() > 0]
    return [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in sources]


def full_through_the_host(self: DTensor, *, grad_placements: Any = None) -> Tensor:
    """`DTensor.full_tensor` by copies on the host, without a gradient."""
    assert grad_placements is None, "a copy on the host has no gradient"
    mesh = DeviceMesh("cpu", self.device_mesh.mesh, mesh_dim_names=self.device_mesh.mesh_dim_names)
    local = self.to_local().detach().cpu()
    copy = DTensor.from_local(local, mesh, self.placements, shape=self.shape, stride=self.stride())
    return copy.redistribute(placements=[Replicate()] * mesh.ndim).to_local().to(self.device)


def gathered(value: Any) -> list[Any]:
    """The picklable values of all ranks, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def communicators() -> int:
    """Number of this rank's process groups with open NCCL connections."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return len(groups) + sum(map(_is_open, groups))


def _is_open(group: dist.ProcessGroup) -> bool:
    # Private: PyTorch has no public test for a group's first collective. torch 2.15's NCCL connects new groups at once.
    if not dist.get_backend(group).startswith("nccl") or dist.get_rank(group) < 0:
        return False
    is_initialized = getattr(group._get_backend(torch.device("cuda")), "_is_initialized", None)
    return is_initialized is None or bool(is_initialized())


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError (PyTorch's) where the host waits for a GPU in this context, except for gloo's own waits."""
    on_gloo = dist.is_initialized() and "cuda:gloo" in dist.get_backend_config()
    if device.type != "cuda" or not torch.cuda.is_available() or on_gloo:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
