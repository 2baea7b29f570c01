"""The asynchronous collectives to gather sharded matrices at the owners and to return the results, with sent bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.types import Plan
from ..program.phases import Collective, Phase
from ..program.program import Program
from ..tensors.device import is_host
from .agreement import Agreement
from .buffers import Buffers, BufferSet

# PyTorch 2.13 renamed two functions, and the old names warn.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Traffic:
    """Collectives and bytes sent by this rank."""

    calls: int = 0
    bytes_sent: int = 0

    def add(self, sent: int) -> None:
        self.calls += 1
        self.bytes_sent += sent


Splits = Sequence[int]


class Collectives:
    """Transport of exchanges.

    Buffers are flat, on one device and of one dtype. Splits count the elements of each rank, in order. Methods start a
    collective and return the handles to wait for.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_to_all(
        self, output: Tensor, output_splits: Splits, input: Tensor, input_splits: Splits, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Send part i of `input` to rank i, and fill `output` with the received parts."""
        output, input = output[: sum(output_splits)], input[: sum(input_splits)]
        self.traffic.add(input.nbytes)
        splits = list(output_splits), list(input_splits)
        return [dist.all_to_all_single(output, input, *splits, group=group, async_op=True)]

    def all_gather(self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `output` with the inputs of all ranks."""
        sent = input.numel() * input.element_size() * (len(splits) - 1)
        if len(set(splits)) == 1:
            self.traffic.add(sent)
            return [_gather_equal(output[: sum(splits)], input, group=group, async_op=True)]
        parts = list(output[: sum(splits)].split(list(splits)))
        if not is_host(input.device):
            return self.all_gather_uneven(parts, input, group)
        # gloo's all-gather takes only equal parts.
        me = dist.get_rank(group)
        parts[me].copy_(input)
        works = []
        for source, part in enumerate(parts):
            if part.numel() > 0:
                self.traffic.add(sent if source == me else 0)
                works.append(dist.broadcast(part, group_src=source, group=group, async_op=True))
        return works

    def all_gather_uneven(self, parts: list[Tensor], input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `parts` with the inputs of all ranks, by direct sends in a single launch."""
        # NCCL's own gather of different sizes takes a broadcast for each rank.
        self.traffic.add(input.nbytes * (len(parts) - 1))
        me = dist.get_rank(group)
        parts[me].copy_(input)
        peers = [(rank, part) for rank, part in enumerate(parts) if rank != me]
        sends = [dist.P2POp(dist.isend, input, group=group, group_peer=r) for r, _ in peers if input.numel() > 0]
        receives = [dist.P2POp(dist.irecv, part, group=group, group_peer=r) for r, part in peers if part.numel() > 0]
        return dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

    def reduce_scatter(
        self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Fill `output` with this rank's part of the sum of `input` over all ranks."""
        self.traffic.add((sum(splits) - splits[dist.get_rank(group)]) * input.element_size())
        if len(set(splits)) == 1:
            return [_scatter_equal(output, input[: sum(splits)], group=group, async_op=True)]
        parts = list(input[: sum(splits)].split(list(splits)))
        return [dist.reduce_scatter(output, parts, group=group, async_op=True)]

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Sum over all ranks, in place. The traffic counts the bytes of a ring all-reduce."""
        ranks = dist.get_world_size(group)
        self.traffic.add(2 * (ranks - 1) * tensor.nbytes // ranks)
        return [dist.all_reduce(tensor, group=group, async_op=True)]


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for collectives: on gloo the host waits, on NCCL the current stream."""
    for work in works:
        work.wait()


class Exchange:
    """Runs the collectives of a program."""

    def __init__(self, program: Program, buffers: Buffers, collectives: Collectives, agreement: Agreement) -> None:
        self._runs, self._buffer_sets, self.collectives = program.buckets, buffers.buffer_sets, collectives
        self._results = [sets.leaving(run) for sets, run in zip(self._buffer_sets, self._runs, strict=True)]
        groups = (phase.group for run in self._runs for phase in run.phases[:2] if phase.travels)
        self._groups = {ranks: agreement.group(ranks) for ranks in groups}
        gathers = [run.replica_gather for run in self._runs if run.replica_gather is not None]
        self._replica_groups = {phase.group: agreement.group(phase.group) for phase in gathers if phase.travels}
        self._module: Any = torch.get_device_module(buffers.device)
        self._stream = self._module.Stream()
        self._pending: dict[int, list[dist.Work]] = {}
        self.timer: AbstractContextManager[object] = nullcontext()
        """Entered for each wait, for measurements."""

    def warm_up(self, plan: Plan) -> None:
        """Run the largest bucket of each group once, because NCCL opens connections by message size. Collective."""
        largest: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        for index, run in enumerate(self._runs):
            # By sizes of whole matrices, all ranks of a group choose the same bucket.
            size = plan.wire_bytes(run.bucket) * sum(plan.matrices[matrix].numel for matrix in run.bucket.matrices)
            group = run.bucket.exchange, run.bucket.group
            largest[group] = max(largest.get(group, (0, 0)), (size, -index))
        for index in sorted(-negative for _, negative in largest.values()):
            self.gather(index)
            self.wait(index)
            self.return_results(index)
            self.wait(index)
        self.collectives.traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        return self.collectives.traffic

    def gather(self, index: int) -> None:
        """Start to send the packed pieces of a bucket to the owners."""
        phase = self._runs[index].gathering
        if not phase.travels:
            return
        buffer_set, group = self._buffer_sets[index], self._groups[phase.group]
        if phase.collective is Collective.ALL_TO_ALL:
            sent = buffer_set.home[phase.kept :]
            works = self.collectives.all_to_all(buffer_set.inbox, phase.owned_splits, sent, phase.home_splits, group)
        else:
            sent = buffer_set.home[: phase.home_numel]
            works = self.collectives.all_gather(buffer_set.inbox, phase.owned_splits, sent, group)
        self._pending[index] = works

    def return_results(self, index: int) -> None:
        """Start to send the results of a bucket to the holders."""
        run = self._runs[index]
        buffer_set, phase, works = self._buffer_sets[index], run.returning, list[dist.Work]()
        if phase is not None and phase.travels:
            group, results = self._groups[phase.group], self._results[index]
            if phase.collective is Collective.ALL_TO_ALL:
                received = buffer_set.home[phase.kept :]
                works = self.collectives.all_to_all(received, phase.home_splits, results, phase.owned_splits, group)
            else:
                received = buffer_set.home[: phase.home_numel]
                works = self.collectives.reduce_scatter(received, phase.owned_splits, results, group)
        if run.replica_gather is not None and run.replica_gather.travels:
            works = self._spread(run.replica_gather, buffer_set, works)
        if works:
            self._pending[index] = works

    def _spread(self, phase: Phase, buffer_set: BufferSet, before: Sequence[dist.Work]) -> list[dist.Work]:
        # On a separate stream, so that the computing stream goes on with the next round.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            wait_all(before)
            group = self._replica_groups[phase.group]
            return self.collectives.all_gather(
                buffer_set.shared, phase.owned_splits, buffer_set.home[: phase.home_numel], group
            )

    def wait(self, index: int) -> None:
        with self.timer:
            for work in self._pending.pop(index, ()):
                work.wait()


def move(source: Tensor, target: Tensor, old: Sequence[int], new: Sequence[int]) -> None:
    """Copy a tensor from the global ranks `old` to the ranks `new`. Collective over these ranks. The host waits."""
    this_rank = dist.get_rank() if dist.is_initialized() else 0
    for rank in new:
        if rank in old:
            if rank == this_rank:
                target.copy_(source)
        elif this_rank == old[0]:
            dist.send(source.to(target.dtype), rank)
        elif this_rank == rank:
            dist.recv(target, old[0])
