"""`offload`: a step streams momentum, gradients and weights from the host to the device, bucket by bucket."""

# [Note: transfers and slots]
# - A transfer is the host tensors of one bucket's element-wise work, before the gather or after the return. Transfers
#   alternate between two slots of device memory. The views of calls are made once, in the slots, so that a step reads
#   views as without offload.
# - Slots are allocated on the computing stream. So the arriving stream first waits for earlier uses of the memory.
# - A transfer leaves after the computing stream has used the tensors. Then a later transfer reuses the slot.
# - Whole rows, because a copy of non-contiguous memory from the host would block. So two calls of a bucket may share a
#   range, and a transfer for each call would lose updates.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm.buffers import StepMemory
from ..options import Offload
from ..plan.exchange.phases import Act
from ..state.host import TRANSFERS_AT_ONCE, carved, slot_bytes
from ..step.foreach import MomentumCall, Rectangle, UpdateCall
from ..step.gradients import StepGradients
from ..step.rank import Rank
from ..step.step import Fetch
from ..step.views import BucketViews

Name = Literal["param", "momentum", "grad"]
Key = tuple[Name, int, int]
"""Kind of tensor, parameter, first row."""
Names = tuple[Name, ...]
HOST_TENSORS: Mapping[Offload, Mapping[Fetch, tuple[Names, Names]]] = {
    "state": {"gather": (("momentum",), ())},
    "parameters": {"gather": (("momentum",), ("grad",)), "update": (("param",), ())},
}
"""Changed tensors, fetched and sent back, and tensors that are only fetched."""
FETCHES: Mapping[Act, Fetch] = {Act.GATHER: "gather", Act.APPLY: "update"}


@dataclass(frozen=True)
class Transfer:
    """The host tensors of one fetch.

    Attributes:
        fetch: before the gather or after the return, of bucket `bucket`.
        rows: ranges of whole rows that the calls use.
        slot: device tensors by name, parameter and first row.
    """

    fetch: Fetch
    bucket: int
    rows: tuple[Rectangle, ...]
    slot: Mapping[Key, Tensor]


@dataclass(frozen=True)
class HostMomentumCall(MomentumCall):
    """A call with gradients on the host. `slot`: of the transfer."""

    slot: Mapping[Key, Tensor]

    def grads(self, gradients: StepGradients) -> list[Tensor]:
        return [_view(self.slot, "grad", part) for part in self.parts]


class HostOffload:
    """The momentum (`state`), or also gradients and weights (`parameters`), are on the host. `views`: in the slots."""

    def __init__(self, rank: Rank, views: Sequence[BucketViews], offload: Offload) -> None:
        self._kinds, self._storage = HOST_TENSORS[offload], rank.storage
        self._names = {name for changed, read in self._kinds.values() for name in (*changed, *read)}
        uses = [(FETCHES[act], index) for act, index in rank.program.acts if FETCHES.get(act) in self._kinds]
        rows = [rows_of(views[i].gathers if fetch == "gather" else views[i].updates) for fetch, i in uses]
        places = [
            [(name, part) for names in self._kinds[fetch] for name in names for part in parts]
            for (fetch, _), parts in zip(uses, rows, strict=True)
        ]
        hosts = [[self._host(name, part) for name, part in place] for place in places]
        size = max((sum(map(slot_bytes, tensors)) for tensors in hosts), default=0)
        count = min(TRANSFERS_AT_ONCE, len(uses))
        self.slots = [torch.empty(size, dtype=torch.uint8, device=rank.device) for _ in range(count)]
        self._transfers = [
            Transfer(*use, parts, _slot(place, carved(self.slots[number % count], tensors)))
            for number, (use, parts, place, tensors) in enumerate(zip(uses, rows, places, hosts, strict=True))
        ]
        made = list(views)
        for transfer in self._transfers:
            made[transfer.bucket] = self._in_slot(made[transfer.bucket], transfer)
        self.views = tuple(made)
        self.memory = StepMemory(self.slots, kept=False)
        self._module: Any = torch.get_device_module(rank.device)
        self._arriving, self._leaving = self._module.Stream(), self._module.Stream()
        self._copies: list[list[tuple[Tensor, Tensor, bool]]] = []
        self._used, self._arrived = 0, dict[int, Any]()

    def _host(self, name: Name, part: Rectangle) -> Tensor:
        """The host tensor, or one like it: a gradient has the dtype and the shape of its weights."""
        stored = self._storage[part.parameter]
        return part.of_momentum(stored) if name == "momentum" else part.of(stored.param)

    def _in_slot(self, views: BucketViews, transfer: Transfer) -> BucketViews:
        slot = transfer.slot
        if transfer.fetch == "update":
            updates = (replace(c, params=tuple(_view(slot, "param", p) for p in c.parts)) for c in views.updates)
            return replace(views, updates=tuple(updates))
        gathers = [replace(c, momentum=tuple(_view(slot, "momentum", p) for p in c.parts)) for c in views.gathers]
        if "grad" in self._names:
            gathers = [HostMomentumCall(c.group, c.parts, c.momentum, c.packed, slot) for c in gathers]
        return replace(views, gathers=tuple(gathers))

    def begin(self, gradients: StepGradients) -> None:
        self.memory.take()
        self._arriving.wait_stream(self._module.current_stream())
        self._copies = [list(self._copies_of(transfer, gradients)) for transfer in self._transfers]
        self._used, self._arrived = 0, {}
        for number in range(min(TRANSFERS_AT_ONCE, len(self._transfers))):
            self._fetch(number)

    def _copies_of(self, transfer: Transfer, gradients: StepGradients) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(device, host, whether it changes) of each tensor. The step decays a parameter without a gradient."""
        for changes, names in zip((True, False), self._kinds[transfer.fetch], strict=True):
            for name, part in ((name, part) for name in names for part in transfer.rows):
                stored, grad = self._storage[part.parameter], gradients.grads[part.parameter]
                if name == "param":
                    host = None if part.parameter in gradients.excluded else part.of(stored.param)
                elif grad is None:
                    host = None
                else:
                    host = part.of(grad) if name == "grad" else part.of_momentum(stored)
                if host is not None:
                    yield transfer.slot[name, part.parameter, part.start], host, changes

    @contextmanager
    def fetched(self, fetch: Fetch) -> Iterator[None]:
        """Hold the next transfer on the device, then send back the changed tensors."""
        if fetch not in self._kinds:
            yield
            return
        current, number = self._module.current_stream(), self._used
        current.wait_event(self._arrived.pop(number))
        yield
        self._leaving.wait_stream(current)
        with self._module.stream(self._leaving):
            for on_device, host, changes in self._copies[number]:
                if changes:
                    host.copy_(on_device, non_blocking=True)
        self._used += 1
        if number + TRANSFERS_AT_ONCE < len(self._transfers):
            self._arriving.wait_stream(self._leaving)
            self._fetch(number + TRANSFERS_AT_ONCE)

    def _fetch(self, number: int) -> None:
        with self._module.stream(self._arriving):
            for on_device, host, _ in self._copies[number]:
                on_device.copy_(host, non_blocking=True)
        self._arrived[number] = self._arriving.record_event()

    def end(self) -> None:
        current = self._module.current_stream()
        current.wait_stream(self._leaving)
        current.wait_stream(self._arriving)
        self._copies = []
        self.memory.free()
        # The user may read parameters on the host after the step.
        if "param" in self._names:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all tensors are on the host."""
        self._module.synchronize()


def rows_of(calls: Iterable[MomentumCall | UpdateCall]) -> tuple[Rectangle, ...]:
    """The rows of these calls. Rectangles side by side share one range."""
    parts = [part for call in calls for part in call.parts]
    return tuple({(part.parameter, part.start): part.rows for part in parts}.values())


def _slot(place: Iterable[tuple[Name, Rectangle]], views: Iterable[Tensor]) -> dict[Key, Tensor]:
    return {(name, part.parameter, part.start): view for (name, part), view in zip(place, views, strict=True)}


def _view(slot: Mapping[Key, Tensor], name: Name, part: Rectangle) -> Tensor:
    rows = slot[name, part.parameter, part.start]
    return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows
