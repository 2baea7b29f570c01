"""Rows of parity on ranks that share a GPU over gloo, because NCCL refuses two ranks on one."""

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from tests.parity.layouts import DEVICE
from tests.parity.training import Row, differences
from titan_muon import Muon
from titan_muon.engine.exchange.exchange import Collectives


def differences_on_device(rank: int, world_size: int, row: Row) -> list[str]:
    """`differences` on the device of all rows, and whether a step opened a process group."""
    if DEVICE.type == "cuda":
        # gloo's direct sends read the memory of a GPU on the host, and crash.
        Collectives.all_gather_uneven = broadcasts  # type: ignore[method-assign]
    groups: list[int] = []
    step = Muon.step

    def counted(muon: Muon, closure: Any = None) -> Any:
        # A first step may build, which opens groups.
        built, before = muon._engine is not None, len(dist.distributed_c10d._world.pg_map)
        loss = step(muon, closure)
        groups.append(built * (len(dist.distributed_c10d._world.pg_map) - before))
        return loss

    with mock.patch.object(Muon, "step", counted):
        found = differences(rank, world_size, row)
    return [*found, *(["a step opened a process group"] if any(groups) else [])]


def broadcasts(self: Collectives, parts: list[Tensor], input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """`Collectives.all_gather_uneven` by broadcasts."""
    parts[dist.get_rank(group)].copy_(input)
    sources = [(rank, part) for rank, part in enumerate(parts) if part.numel() > 0]
    return [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in sources]
