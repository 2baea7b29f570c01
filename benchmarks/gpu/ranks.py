"""A rank of a part: device, process group, and GPU-only records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def begin(device: str) -> torch.device:
    """Join the processes of torchrun, over NCCL on `cuda`, over gloo on `cpu`. Returns this rank's device."""
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine)
    return mine


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
    """Raise RuntimeError (PyTorch's) where the host waits for a GPU in this context."""
    if device.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
