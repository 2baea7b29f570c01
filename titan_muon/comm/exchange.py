"""Buffers and collectives that assemble sharded matrices at their owners and bring the results back.

Every collective is asynchronous: `wait` blocks the host on gloo, and only the current stream on NCCL, whose own stream
carries the transfer. Buffers and their views are made once and used by every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..plan.exchange.phases import BucketProgram, Collective, Leg
from ..plan.program import Program
from .agreement import Agreement
from .buffers import Buffers, Slot
from .collectives import Collectives, Traffic, finish


class Exchange:
    """Runs the collectives of a program. A local bucket has none.

    Args:
        program: this rank's part of the plan.
        buffers: buffers of the program.
        collectives: transport of the buffers.
        agreement: owner of the process groups.
        apart: whether gathers and returns have their own process groups.
    """

    def __init__(
        self, program: Program, buffers: Buffers, collectives: Collectives, agreement: Agreement, *, apart: bool
    ) -> None:
        self._runs, self._slots, self.collectives = program.buckets, buffers.slots, collectives
        group = agreement.group_apart if apart else agreement.group
        self._groups = {leg.group: group(leg.group) for run in self._runs for leg in run.legs[:2] if leg.travels}
        spreading = [run.spreading for run in self._runs if run.spreading is not None]
        self._lines = {leg.group: agreement.group(leg.group) for leg in spreading if leg.travels}
        self._module: Any = torch.get_device_module(buffers.device)
        self._stream = self._module.Stream()
        self._pending: dict[int, list[dist.Work]] = {}

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank."""
        return self.collectives.traffic

    def gather(self, index: int) -> None:
        """Start to send the pieces in the home buffer to the owners of their matrices."""
        leg = self._runs[index].gathering
        if not leg.travels:
            return
        slot = self._slots[index]
        group = self._groups[leg.group]
        if leg.collective is Collective.ALL_TO_ALL:
            # Pieces of matrices that this rank owns come first in the home buffer, and never travel.
            sent = slot.home[leg.kept :]
            works = self.collectives.all_to_all(slot.inbox, leg.owned_splits, sent, leg.home_splits, group)
        else:
            works = self.collectives.all_gather(slot.inbox, leg.owned_splits, slot.home[: leg.home_numel], group)
        self._pending[index] = works

    def return_results(self, index: int) -> None:
        """Start to send the orthogonalized pieces back to every rank that stores them."""
        run = self._runs[index]
        if not any(leg.travels for leg in run.legs[1:]):
            return
        slot = self._slots[index]
        works = [] if run.returning is None or not run.returning.travels else self._return(run, run.returning, slot)
        if run.spreading is not None and run.spreading.travels:
            works = self._spread(run.spreading, slot, works)
        if works:
            self._pending[index] = works

    def _return(self, run: BucketProgram, leg: Leg, slot: Slot) -> list[dist.Work]:
        group = self._groups[leg.group]
        if leg.collective is Collective.ALL_TO_ALL:
            received = slot.home[leg.kept :]
            return self.collectives.all_to_all(received, leg.home_splits, slot.leaving(run), leg.owned_splits, group)
        received = slot.home[: leg.home_numel]
        return self.collectives.reduce_scatter(received, leg.owned_splits, slot.outbox, group)

    def _spread(self, leg: Leg, slot: Slot, before: Sequence[dist.Work]) -> list[dist.Work]:
        # On a separate stream that waits for the return, so that the computing stream goes on with the next round.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            finish(before)
            group = self._lines[leg.group]
            return self.collectives.all_gather(slot.shared, leg.owned_splits, slot.home[: leg.home_numel], group)

    def wait(self, index: int) -> None:
        """Wait for the last collective of bucket number `index` of the program."""
        finish(self._pending.pop(index, []))
