"""`offload`: a step streams momentum, gradients and weights from the host to the device, bucket by bucket."""

# [Note: transfers and slots]
# - A transfer is the host tensors of one use. A use is the element-wise work of a bucket, before the gather or after
#   the return. Transfers alternate between two slots of device memory.
# - The views of Muon's calls are made once, in the slots, so that a step reads views as without offload.
# - Slots are allocated on the computing stream. So the arriving stream first waits for earlier uses of the memory, and
#   for the last step's transfers to the host.
# - A transfer leaves after the computing stream has used the tensors. Then a later transfer reuses the slot. At the end
#   the computing stream waits for all transfers.
# - Whole rows, because a copy of non-contiguous memory from the host would block. So two calls of a bucket may share a
#   range, and a transfer for each call would lose updates.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..engine.exchange.exchange import StepMemory
from ..engine.program.phases import Act
from ..engine.step.algorithm import PlanContext
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import MomentumCall, Rectangle, StepContext, UpdateCall, carved, slot_bytes
from ..engine.step.gradients import StepGradients
from ..engine.step.step import Fetch
from ..engine.step.views import BucketViews
from ..options import Offload, OptionError

TRANSFERS_AT_ONCE = 2
"""One transfer is in use while the next arrives or the last leaves."""


class Copied(NamedTuple):
    """A contiguous host tensor and its place in a slot. `changes`: whether the step sends the tensor back."""

    on_device: Tensor
    host: Tensor
    changes: bool


class Window:
    """Copies host tensors to slots and back, see [Note: transfers and slots]. On a CPU the copies run too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._arriving, self._leaving = self._module.Stream(), self._module.Stream()
        self._transfers: Sequence[Sequence[Copied]] = ()
        self._used, self._arrived = 0, dict[int, Any]()

    def slots(self, transfers: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """New slots, and by transfer the views of a slot with the shapes and dtypes of the host tensors."""
        size = max((sum(map(slot_bytes, tensors)) for tensors in transfers), default=0)
        count = min(TRANSFERS_AT_ONCE, len(transfers))
        slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        return slots, [list(carved(slots[number % count], tensors)) for number, tensors in enumerate(transfers)]

    def begin(self, transfers: Sequence[Sequence[Copied]]) -> None:
        # An exception in the last step may have left the window open.
        self.end()
        self._transfers, self._used = transfers, 0
        self._arriving.wait_stream(self._current)
        for number in range(min(TRANSFERS_AT_ONCE, len(transfers))):
            self._fetch(number)

    @contextmanager
    def fetched(self) -> Iterator[None]:
        """Hold the next transfer on the device, then send back the changed tensors, and fetch into the slot."""
        number = self._used
        self._current.wait_event(self._arrived[number])
        yield
        self._leaving.wait_stream(self._current)
        with self._module.stream(self._leaving):
            for on_device, host, changes in self._transfers[number]:
                if changes:
                    host.copy_(on_device, non_blocking=True)
        del self._arrived[number]
        self._used += 1
        later = number + TRANSFERS_AT_ONCE
        if later < len(self._transfers):
            self._arriving.wait_stream(self._leaving)
            self._fetch(later)

    def end(self) -> None:
        """Forget the transfers. The computing stream waits for them."""
        self._current.wait_stream(self._leaving)
        self._current.wait_stream(self._arriving)
        self._arrived.clear()
        self._transfers = ()

    def synchronize(self) -> None:
        """Wait until all tensors are on the host."""
        self._module.synchronize()

    @property
    def _current(self) -> Any:
        return self._module.current_stream()

    def _fetch(self, number: int) -> None:
        with self._module.stream(self._arriving):
            for on_device, host, _ in self._transfers[number]:
                on_device.copy_(host, non_blocking=True)
        self._arrived[number] = self._arriving.record_event()


Name = Literal["param", "momentum", "grad"]
SlotKey = tuple[Name, int, int]
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
    slot: Mapping[SlotKey, Tensor]


class HostOffload:
    """The momentum (`state`), or also gradients and weights (`parameters`), are on the host. `views`: in the slots."""

    captured = False

    def __init__(self, rank: StepContext, views: Sequence[BucketViews], offload: Offload) -> None:
        self._kinds, self._storage = HOST_TENSORS[offload], rank.storage
        # None: gradients of any dtype, which fit in float32.
        dtypes = (trained.param.grad_dtype for trained in rank.params)
        self._grad_dtypes = [torch.float32 if dtype is None else dtype for dtype in dtypes]
        self._names = {name for changed, read in self._kinds.values() for name in (*changed, *read)}
        uses = [(FETCHES[act], index) for act, index in rank.program.acts if FETCHES.get(act) in self._kinds]
        rows = [rows_used(views[i].gathers if fetch == "gather" else views[i].updates) for fetch, i in uses]
        places = [
            [(name, part) for names in self._kinds[fetch] for name in names for part in parts]
            for (fetch, _), parts in zip(uses, rows, strict=True)
        ]
        hosts = [[self._host(name, part) for name, part in place] for place in places]
        self.window = Window(rank.device)
        slots, on_device = self.window.slots(hosts)
        self._transfers = [
            Transfer(*use, parts, _slot(place, tensors))
            for use, parts, place, tensors in zip(uses, rows, places, on_device, strict=True)
        ]
        made = list(views)
        for transfer in self._transfers:
            made[transfer.bucket] = self._in_slot(made[transfer.bucket], transfer)
        self.views = tuple(made)
        self.memory = StepMemory(slots, kept=False)

    def _host(self, name: Name, part: Rectangle) -> Tensor:
        """The host tensor, or for a gradient one like it, without memory."""
        stored = self._storage[part.parameter]
        if name == "grad":
            return part.of(stored.param).to("meta", self._grad_dtypes[part.parameter])
        return part.of_momentum(stored) if name == "momentum" else part.of(stored.param)

    def _in_slot(self, views: BucketViews, transfer: Transfer) -> BucketViews:
        slot = transfer.slot
        if transfer.fetch == "update":
            updates = (replace(c, params=tuple(_view(slot, "param", p) for p in c.parts)) for c in views.updates)
            return replace(views, updates=tuple(updates))
        gathers = [replace(c, momentum=tuple(_view(slot, "momentum", p) for p in c.parts)) for c in views.gathers]
        if "grad" in self._names:
            gathers = [replace(c, grads=tuple(_view(slot, "grad", p) for p in c.parts)) for c in gathers]
        return replace(views, gathers=tuple(gathers))

    def begin(self, gradients: StepGradients) -> None:
        self.memory.take()
        self.window.begin([list(self._copies_of(transfer, gradients)) for transfer in self._transfers])

    def _copies_of(self, transfer: Transfer, gradients: StepGradients) -> Iterator[Copied]:
        # The step decays a parameter without a gradient.
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
                    yield Copied(transfer.slot[name, part.parameter, part.start], host, changes)

    def fetched(self, fetch: Fetch) -> AbstractContextManager[None]:
        """Hold the next transfer on the device, if this work has transfers."""
        return self.window.fetched() if fetch in self._kinds else nullcontext()

    def end(self) -> None:
        self.window.end()
        self.memory.free()
        # The user may read parameters on the host after the step.
        if "param" in self._names:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all tensors are on the host."""
        self.window.synchronize()


def rows_used(calls: Iterable[MomentumCall | UpdateCall]) -> tuple[Rectangle, ...]:
    """The rows of these calls. Rectangles side by side share one range."""
    parts = [part for call in calls for part in call.parts]
    return tuple({(part.parameter, part.start): part.rows for part in parts}.values())


def _slot(place: Iterable[tuple[Name, Rectangle]], views: Iterable[Tensor]) -> dict[SlotKey, Tensor]:
    return {(name, part.parameter, part.start): view for (name, part), view in zip(place, views, strict=True)}


def _view(slot: Mapping[SlotKey, Tensor], name: Name, part: Rectangle) -> Tensor:
    rows = slot[name, part.parameter, part.start]
    return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows


class OffloadFeature(Feature):
    """Tensors on the host between steps."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for an overlap that needs tensors on the device, and for matrices that share rows."""
        options = context.options
        if options.overlap != "none" and (options.overlap, options.offload) != ("forward", "state"):
            problem = (
                f"= {options.overlap!r} needs momentum and parameters on the device; set 'none', or offload = 'none'"
            )
            raise OptionError("overlap", problem)
        # Transfers move whole rows, so two transfers would overwrite common rows.
        if shared := next((parameter.fqn for parameter in context.parameters if parameter.stack.interleaved), None):
            problem = (
                f'= "{options.offload}" does not take {shared}, whose matrices share rows of its storage; set "none"'
            )
            raise OptionError("offload", problem)

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        parts.offload = offload = HostOffload(parts.rank, parts.views, parts.rank.options.offload)
        parts.views = offload.views
        parts.hooks.append(offload)
