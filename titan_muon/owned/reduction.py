"""Gradients on their way from all ranks to the owners, overlapped with the backward pass that makes the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .param import OwnedParam
from .param_group import CommContext, OwnedParamGroup, split_sizes, views


class Reduction:
    """The gradients of one param group: reduce-scattered to the owners, and then summed over replicas.

    Args:
        params: trained parameters of the group, at least one, in the order of their owners.
        comm: ranks that share them.
        dtype: dtype of the sum and in transit.
        divide_factor: number that the sum is divided by.
    """

    def __init__(
        self, params: Sequence[OwnedParam], comm: CommContext, dtype: torch.dtype, divide_factor: float
    ) -> None:
        splits = split_sizes(params, comm.shard_size)
        self._mine = [param for param in params if param.owner == comm.shard_rank]
        self._replicate_group, self._divide_factor = comm.replicate_group, divide_factor
        device = params[0].unsharded_param.device
        self._input: Tensor | None = torch.empty(sum(splits), dtype=dtype, device=device)
        self._sum = torch.empty(splits[comm.shard_rank], dtype=dtype, device=device)
        for param, part in zip(params, views(self._input, params), strict=True):
            # What this rank did not use counts as zero. To leave it out would change the sizes on this rank alone, and
            # the collective would hang, or pair elements of different parameters.
            if param.unsharded_accumulated_grad is None:
                part.zero_()
            else:
                part.copy_(param.unsharded_accumulated_grad)
                param.unsharded_accumulated_grad = None
        self._works = comm.collectives.reduce_scatter(self._sum, splits, self._input, comm.shard_group)

    def advance(self) -> None:
        """Once the reduce-scatter is done, free its input, and start the sum over replicas, if there are any."""
        if self._input is None:
            return
        self._wait()
        self._input = None
        # A rank without parameters of this group has the same owner in each replica, which has none either: all of the
        # replicate group leave the collective out.
        if self._replicate_group is not None and self._sum.numel() > 0:
            work = dist.all_reduce(self._sum, group=self._replicate_group, async_op=True)
            assert work is not None, "an asynchronous collective returns what there is to wait for"
            self._works = [work]

    def finish(self) -> None:
        """Give the owned parameters their gradients."""
        self.advance()
        self._wait()
        # After the sum, not in the collective as FSDP2 does: gloo has no reduction that multiplies first.
        if self._divide_factor != 1:
            self._sum.div_(self._divide_factor)
        for param, part in zip(self._mine, views(self._sum, self._mine), strict=True):
            param.add_reduced_grad(part)

    def discard(self) -> None:
        """End without a result."""
        # Waited for all the same: freed under a collective, the memory would be another tensor's.
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class Reductions:
    """The reductions of one backward pass, oldest first.

    One group's gradients travel in the shard group, and with replicas those of the group before it between them, while
    the next are made. Every rank starts them in the order of its backward pass, which is the same on all of them.
    """

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self._pending: deque[Reduction] = deque()

    @torch.no_grad()
    def start(self, group: OwnedParamGroup, dtype: torch.dtype | None, divide_factor: float) -> None:
        """Send the group's gradients to their owners."""
        params = group.trained
        if not params:
            return
        # Before this group's input is allocated, or two of them would be there at once. With replicas the group before
        # stays under way, without its input: it is in its all-reduce while this one is in its reduce-scatter.
        self._finish_but(0 if self._comm.replicate_group is None else 1)
        chosen = params[0].unsharded_param.dtype if dtype is None else dtype
        self._pending.append(Reduction(params, self._comm, chosen, divide_factor))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all that are under way."""
        self._finish_but(0)

    def discard(self) -> None:
        """Forget those that are under way, which a backward pass that raised has left."""
        for reduction in self._pending:
            reduction.discard()
        self._pending.clear()

    def _finish_but(self, left: int) -> None:
        # All-reduces start at this point of the backward pass, and not whenever a reduce-scatter happens to be done:
        # that differs between ranks, and would mix up the order of their collectives.
        for reduction in self._pending:
            reduction.advance()
        while len(self._pending) > left:
            self._pending.popleft().finish()
