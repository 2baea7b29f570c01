"""Gradients on their way from all ranks to the owners, overlapped with the backward pass that makes the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .param import OwnedParam, OwnedPart
from .param_group import CommContext, OwnedParamGroup, numel, owned_by, parts_of, runs, views


class Reduction:
    """The gradients of one param group: reduced to the owners, and then summed over replicas.

    See [Note: streams and memory].

    Args:
        params: trained parameters of the group, at least one, in the order of their owners.
        comm: ranks that share them.
        dtype: dtype of the sum and in transit.
        divide_factor: number that the sum is divided by.
    """

    def __init__(
        self, params: Sequence[OwnedParam], comm: CommContext, dtype: torch.dtype, divide_factor: float
    ) -> None:
        self._comm, self._divide_factor = comm, divide_factor
        parts = parts_of(params)
        self._mine = owned_by(comm.shard_rank, params)
        theirs = [part for part in parts if part.owner != comm.shard_rank]
        self._gradients = {param: param.take_accumulated_grad() for param in params}
        self._summed: Any = None
        device, streams = params[0].unsharded_param.device, comm.streams
        # What computes goes on at once, and does not copy.
        streams.reduce.wait_stream(streams.current)
        with streams.within(streams.reduce):
            self._sum = torch.empty(numel(self._mine), dtype=dtype, device=device)
            self._input: Tensor | None = torch.empty(numel(theirs), dtype=dtype, device=device)
            self._copy_in(self._mine, self._sum)
            self._copy_in(theirs, self._input)
            self._copied = streams.reduce.record_event()
            owners, sizes = runs(parts)
            # Of its own parts, an owner has no other copy: the sum comes in their place.
            own = [owner == comm.shard_rank for owner in owners]
            pieces = {
                mine: iter(flat.split([size for size, of_mine in zip(sizes, own, strict=True) if of_mine == mine]))
                for mine, flat in ((True, self._sum), (False, self._input))
            }
            self._works = comm.collectives.reduce(owners, [next(pieces[mine]) for mine in own])
        if self._copied is None:
            self._gradients = {}

    def _copy_in(self, parts: Sequence[OwnedPart], flat: Tensor) -> None:
        for part, place in zip(parts, views(flat, [part.size for part in parts]), strict=True):
            gradient = self._gradients[part.param]
            # What this rank did not use counts as zero. To leave it out would change the sizes on this rank alone, and
            # the collective would hang, or pair elements of different parameters.
            if gradient is None:
                place.zero_()
            else:
                place.copy_(part.of(gradient))

    def advance(self) -> None:
        """Once the gradients are at their owners, free what they came from, and start the sum over replicas, if any."""
        if self._input is None:
            return
        self._release()
        # A rank without parameters of this group has the same owner in each replica, which has none either: all of the
        # replicate group leave the collective out.
        group, streams = self._comm.replicate_group, self._comm.streams
        if group is not None and self._sum.numel() > 0:
            streams.all_reduce.wait_stream(streams.reduce)
            with streams.within(streams.all_reduce):
                self._works = self._comm.collectives.all_reduce(self._sum, group)
                self._summed = streams.all_reduce.record_event()

    def finish(self) -> None:
        """Give the owned parameters their gradients."""
        self.advance()
        self._wait()
        with self._comm.streams.within(self._comm.streams.reduce):
            # After the sum, not in the collective as FSDP2 does: gloo has no reduction that multiplies first.
            if self._divide_factor != 1:
                self._sum.div_(self._divide_factor)
            sums, peers = views(self._sum, [part.size for part in self._mine]), self._comm.peers
            whole = zip(self._mine, sums, strict=True) if peers is None else peers.collect(self._mine, sums)
            for part, total in whole:
                part.param.add_reduced_grad(total)

    def discard(self) -> None:
        """End without a result."""
        # Waited for all the same: freed under a collective, the memory would be another tensor's.
        self._release()

    def _release(self) -> None:
        """Free the gradients and what those of others were copied into."""
        self._wait()
        self._comm.streams.current.wait_event(self._copied)
        self._gradients, self._input = {}, None

    def _wait(self) -> None:
        """Have the reduce stream go on after this reduction's last collective."""
        streams = self._comm.streams
        with streams.within(streams.reduce):
            for work in self._works:
                work.wait()
        self._works = []
        if self._summed is not None:
            # This sum alone and not its stream, where the next group's may have been started.
            streams.reduce.wait_event(self._summed)


class Reductions:
    """The reductions of one backward pass, oldest first.

    One group's gradients travel in the shard group, and with replicas those of the group before it between them, while
    the next are made. Every rank starts them in the order of its backward pass, which is the same on all of them.

    Attributes:
        pending: those under way.
    """

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self.pending: deque[Reduction] = deque()

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
        self.pending.append(Reduction(params, self._comm, chosen, divide_factor))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all that are under way: from here on what computes sees the owners' gradients."""
        self._finish_but(0)
        self._comm.streams.current.wait_stream(self._comm.streams.reduce)

    def discard(self) -> None:
        """Forget those that are under way, which a backward pass that raised has left."""
        for reduction in self.pending:
            reduction.discard()
        self.pending.clear()

    def _finish_but(self, left: int) -> None:
        # All-reduces start at this point of the backward pass, and not whenever a reduce-scatter happens to be done:
        # that differs between ranks, and would mix up the order of their collectives.
        for reduction in self.pending:
            reduction.advance()
        while len(self.pending) > left:
            self.pending.popleft().finish()
