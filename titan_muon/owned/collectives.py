"""The collectives of owned parameters: broadcasts from the owners, reductions to them, and sums over replicas.

A layer takes one operation for each of its owners, of which there are never more than it has matrices, however many
ranks there are, and one for each owner of a stack. An all-gather or a reduce-scatter of unequal parts is one operation
for each rank on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import Traffic
from . import private


@dataclass(frozen=True)
class OwnerCollectives:
    """What carries a layer's parameters and gradients between the ranks of a group.

    Parts are contiguous tensors, each with its owner, a rank of the group; all ranks give the same owners in the same
    order. Every method starts its operations and returns what there is to wait for, which is nothing if they run in a
    stream.

    Attributes:
        group: process group whose ranks own the parameters.
        in_stream: whether the operations of a layer are launched together, in the stream that is current.
        traffic: what was sent from this rank to gather and reduce.
    """

    group: dist.ProcessGroup
    in_stream: bool
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> OwnerCollectives:
        """The collectives of a group as its backend runs them best."""
        # NCCL launches a group of operations as one kernel, and one that is not asynchronous in the current stream, so
        # that the stream's priority is the kernel's. gloo can do neither: after it has refused to coalesce, later
        # collectives silently do nothing, and one that is not asynchronous stops the host.
        return cls(group, private.coalesces(group, device))

    def gather(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Fill every part with what its owner has in it."""
        return self._start(self._broadcast, owners, parts)

    def reduce(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Have every owner's part hold the sum over all ranks; on other ranks what it holds is lost."""
        return self._start(self._reduce, owners, parts)

    def all_reduce(self, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Sum a tensor over the ranks of another group."""
        work = dist.all_reduce(part, group=group, async_op=not self.in_stream)
        return [] if work is None else [work]

    def _start(
        self, operation: Callable[[Tensor, int], dist.Work | None], owners: Sequence[int], parts: Sequence[Tensor]
    ) -> list[dist.Work]:
        # Before the first is launched: what raises between the start and the end of a group leaves it open for ever.
        owned = [(part, owner) for owner, part in zip(owners, parts, strict=True) if part.numel() > 0]
        if self.in_stream and owned:
            with private.coalesced(self.group, owned[0][0].device):
                for part, owner in owned:
                    operation(part, owner)
            return []
        works = [operation(part, owner) for part, owner in owned]
        return [work for work in works if work is not None]

    def _broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(part.nbytes * (self.group.size() - 1) if owner == self.group.rank() else 0)
        return dist.broadcast(part, group_src=owner, group=self.group, async_op=not self.in_stream)

    def _reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(0 if owner == self.group.rank() else part.nbytes)
        return dist.reduce(part, group_dst=owner, group=self.group, async_op=not self.in_stream)
