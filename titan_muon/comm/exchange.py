"""The asynchronous collectives to gather sharded matrices at the owners and to return the results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..plan.exchange.phases import Collective, Phase
from ..plan.program import Program
from ..plan.terms.types import Plan
from .agreement import Agreement
from .buffers import Buffers, BufferSet
from .collectives import Collectives, Traffic, wait_all


class Exchange:
    """Runs the collectives of a program. `exclusive`: whether gathers and returns have their own process groups."""

    def __init__(
        self, program: Program, buffers: Buffers, collectives: Collectives, agreement: Agreement, *, exclusive: bool
    ) -> None:
        self._runs, self._buffer_sets, self.collectives = program.buckets, buffers.buffer_sets, collectives
        group = agreement.exclusive_group if exclusive else agreement.group
        self._groups = {
            phase.group: group(phase.group) for run in self._runs for phase in run.phases[:2] if phase.travels
        }
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
            size = sum(plan.matrices[matrix].numel for matrix in run.bucket.matrices)
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
            group, results = self._groups[phase.group], buffer_set.leaving(run)
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
