"""Reductions of gradients to the owners, overlapped with backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.exchange.exchange import wait_all
from .comm import OwnerComm
from .param import OwnedParam, OwnedPart
from .param_group import OwnedParamGroup, numel, owned_by, parts_of, runs, views


class Reduction:
    """The reduction of gradients to the owners, then over replicas; [Note: streams and memory].

    `params`: trained, at least one, in the order of owners. `dtype`: of the sum and in transit.
    """

    def __init__(self, params: Sequence[OwnedParam], comm: OwnerComm, dtype: torch.dtype, divide_factor: float) -> None:
        self._comm, self._divide_factor = comm, divide_factor
        parts = parts_of(params)
        self._mine = owned_by(comm.shard_rank, params)
        not_mine = [part for part in parts if part.owner != comm.shard_rank]
        self._gradients = {param: param.take_accumulated_grad() for param in params}
        self._summed: Any = None
        device, streams = params[0].unsharded_param.device, comm.streams
        # On the reduce stream, so that the compute stream continues at once.
        streams.reduce.wait_stream(streams.current)
        with streams.within(streams.reduce):
            self._sum = torch.empty(numel(self._mine), dtype=dtype, device=device)
            self._input: Tensor | None = torch.empty(numel(not_mine), dtype=dtype, device=device)
            self._copy_in(self._mine, self._sum)
            self._copy_in(not_mine, self._input)
            self._copied = streams.reduce.record_event()
            owners, sizes = runs(parts)
            # Owned parts are summed in place, without a second copy.
            own = [owner == comm.shard_rank for owner in owners]
            pieces = {
                mine: iter(flat.split([size for size, of_mine in zip(sizes, own, strict=True) if of_mine == mine]))
                for mine, flat in ((True, self._sum), (False, self._input))
            }
            self._works = comm.reduce(owners, [next(pieces[mine]) for mine in own])
        if self._copied is None:
            self._gradients = {}

    def _copy_in(self, parts: Sequence[OwnedPart], flat: Tensor) -> None:
        for part, view in zip(parts, views(flat, [part.size for part in parts]), strict=True):
            gradient = self._gradients[part.param]
            # An unused parameter counts as zero. With unequal sizes the collective would hang or mix up parameters.
            if gradient is None:
                view.zero_()
            else:
                view.copy_(part.of(gradient))

    def advance(self) -> None:
        """After the reduction, free the inputs and start the all-reduce over replicas, if any."""
        if self._input is None:
            return
        self.release()
        # Owners are at equal positions in each replica, so all ranks of the group skip or none.
        group, streams = self._comm.replicate_group, self._comm.streams
        if group is not None and self._sum.numel() > 0:
            streams.all_reduce.wait_stream(streams.reduce)
            with streams.within(streams.all_reduce):
                self._works = self._comm.all_reduce(self._sum, group)
                self._summed = streams.all_reduce.record_event()

    def finish(self) -> None:
        self.advance()
        self._wait()
        with self._comm.streams.within(self._comm.streams.reduce):
            # gloo has no reduction with a premultiplied factor as used by FSDP2.
            if self._divide_factor != 1:
                self._sum.div_(self._divide_factor)
            sums = views(self._sum, [part.size for part in self._mine])
            for part, total in zip(self._mine, sums, strict=True):
                part.param.add_reduced_grad(total)

    def release(self) -> None:
        # Memory freed during a collective could be reused while the collective still writes.
        self._wait()
        self._comm.streams.current.wait_event(self._copied)
        self._gradients, self._input = {}, None

    def _wait(self) -> None:
        streams = self._comm.streams
        with streams.within(streams.reduce):
            wait_all(self._works)
        self._works = []
        if self._summed is not None:
            # The next group's all-reduce may have started on the stream.
            streams.reduce.wait_event(self._summed)


class Reductions:
    """The pending reductions of a backward pass, oldest first: one, or with replicas two."""

    def __init__(self, comm: OwnerComm) -> None:
        self._comm = comm
        self.pending: deque[Reduction] = deque()

    @torch.no_grad()
    def start(self, group: OwnedParamGroup, dtype: torch.dtype | None, divide_factor: float) -> None:
        params = group.trained
        if not params:
            return
        # First, so that only a single input is allocated. With replicas the previous group's all-reduce overlaps this
        # group's reduction.
        self._finish_but(0 if self._comm.replicate_group is None else 1)
        reduce_dtype = params[0].unsharded_param.dtype if dtype is None else dtype
        self.pending.append(Reduction(params, self._comm, reduce_dtype, divide_factor))

    @torch.no_grad()
    def finish(self) -> None:
        self._finish_but(0)
        self._comm.streams.current.wait_stream(self._comm.streams.reduce)

    def discard(self) -> None:
        for reduction in self.pending:
            reduction.release()
        self.pending.clear()

    def _finish_but(self, left: int) -> None:
        # At a fixed point of backward, so that all ranks launch collectives in the same order.
        for reduction in self.pending:
            reduction.advance()
        while len(self.pending) > left:
            self.pending.popleft().finish()
