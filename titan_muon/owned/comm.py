"""Collectives and streams of owned parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..engine.exchange.exchange import Traffic
from ..engine.tensors.dtensor import current_device
from . import private

HIGH_PRIORITY = -1

# [Note: streams and memory]
# - The caching allocator reuses freed memory for later kernels of the stream current at allocation. So this stream must
#   wait for uses on a second stream before the host frees the memory.
# - Unsharded buffers belong to the compute stream, like all readers. The gather stream waits for the compute stream
#   before filling a buffer.
# - Gradients from autograd belong to the compute stream. The host keeps references until the compute stream has waited
#   for the copy of the gradients.
# - The input and the sum of a reduction belong to the reduce stream. The host may free them right after launch, because
#   the reduce stream waits for the all-reduce stream.
# - The reduce stream waits for the compute stream before allocation, because an optimizer may have just read the
#   previous gradients in the same memory.


class Streams:
    """Streams with FSDP2's roles and priorities."""

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        # High priority, because all ranks wait for these kernels. The all-reduce has the time of a whole layer.
        self.gather: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.reduce: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.all_reduce: Any = self._device.Stream()

    @property
    def current(self) -> Any:
        return self._device.current_stream()

    def within(self, stream: Any) -> Any:
        return self._device.stream(stream)


class OwnerComm:
    """The data-parallel ranks of a model with owned parameters, and the collectives between them.

    Parts are contiguous tensors, each with an owner, a rank of the shard axis. All ranks pass equal owners in equal
    order. Collectives return the works to wait for: none if the operations run in the current stream.

    Args:
        mesh: (shard,) or (replicate, shard).

    Attributes:
        replicate_group: the owners of the same parameters in each replica, or None.
        shard_rank, shard_size: this rank among the owners, and their number.

    Raises ValueError for an invalid mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"mesh has {mesh.ndim} axes; give (shard,) or (replicate, shard), as to fully_shard")
        if mesh.get_coordinate() is None:
            ranks = mesh.mesh.flatten().tolist()
            raise ValueError(f"this rank is not in the mesh {ranks}: it can neither own nor use its parameters")
        self.mesh, self.traffic = mesh, Traffic()
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self._group = mesh.get_group(mesh.ndim - 1)
        self.shard_rank, self.shard_size = self._group.rank(), self._group.size()
        # NCCL launches coalesced operations as a single kernel in the current stream. gloo does not: after a refused
        # coalescing later collectives silently do nothing, and a synchronous operation blocks the host.
        self._in_stream = private.coalesces(self._group, torch.device(mesh.device_type))

    # Both on first use, because a dry run builds models without the device.

    @cached_property
    def streams(self) -> Streams:
        return Streams(self.mesh.device_type)

    @property
    def device(self) -> torch.device:
        """Not the parameters' device, which may be meta or the host."""
        return current_device(self.mesh.device_type)

    def gather(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        return self._start(self._broadcast, owners, parts)

    def reduce(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Sum every part over all ranks at its owner; other ranks lose the content of the part."""
        return self._start(self._reduce, owners, parts)

    def all_reduce(self, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        work = dist.all_reduce(part, group=group, async_op=not self._in_stream)
        return [] if work is None else [work]

    def _start(
        self, operation: Callable[[Tensor, int], dist.Work | None], owners: Sequence[int], parts: Sequence[Tensor]
    ) -> list[dist.Work]:
        # An exception within a coalesced group leaves the group open forever.
        owned = [(part, owner) for owner, part in zip(owners, parts, strict=True) if part.numel() > 0]
        joined = self._in_stream and bool(owned)
        with private.coalesced(self._group, owned[0][0].device) if joined else nullcontext():
            works = [operation(part, owner) for part, owner in owned]
        return [] if self._in_stream else [work for work in works if work is not None]

    def _broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(part.nbytes * (self.shard_size - 1) if owner == self.shard_rank else 0)
        return dist.broadcast(part, group_src=owner, group=self._group, async_op=not self._in_stream)

    def _reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(0 if owner == self.shard_rank else part.nbytes)
        return dist.reduce(part, group_dst=owner, group=self._group, async_op=not self._in_stream)
