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
from itertools import chain
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


Name = Literal["momentum", "grads", "params"]
"""Kind of host tensor, and the field of its views in a call."""
Names = tuple[Name, ...]
HOST_TENSORS: Mapping[Offload, Mapping[Fetch, tuple[Names, Names]]] = {
    "state": {"gather": (("momentum",), ())},
    "parameters": {"gather": (("momentum",), ("grads",)), "update": (("params",), ())},
}
"""Changed tensors, fetched and sent back, and tensors that are only fetched."""
FETCHES: Mapping[Act, Fetch] = {Act.GATHER: "gather", Act.APPLY: "update"}
CALLS: Mapping[Fetch, str] = {"gather": "gathers", "update": "updates"}
"""The field of `BucketViews` with the calls that use a transfer."""


@dataclass(frozen=True)
class Transfer:
    """The host tensors of one fetch.

    Attributes:
        fetch: before the gather or after the return, of bucket `bucket`.
        slot: by name, parameter and first row, a range of whole rows that the calls use, and the device tensor.
    """

    fetch: Fetch
    bucket: int
    slot: Mapping[tuple[Name, int, int], tuple[Rectangle, Tensor]]

    def view(self, name: Name, part: Rectangle) -> Tensor:
        _, rows = self.slot[name, part.parameter, part.start]
        return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows


class HostOffload:
    """The momentum (`state`), or also gradients and weights (`parameters`), are on the host. `views`: in the slots."""

    captured = False

    def __init__(self, rank: StepContext, views: Sequence[BucketViews], offload: Offload) -> None:
        self._kinds, self._storage = HOST_TENSORS[offload], rank.storage
        # None: gradients of any dtype, which fit in float32.
        dtypes = (trained.param.grad_dtype or torch.float32 for trained in rank.params)
        grads = [stored.param.to("meta", dtype) for stored, dtype in zip(rank.storage, dtypes, strict=True)]
        uses = [(FETCHES[act], index) for act, index in rank.program.acts if FETCHES.get(act) in self._kinds]
        places = [
            [(name, rows) for name in chain(*self._kinds[fetch]) for rows in rows_used(getattr(views[i], CALLS[fetch]))]
            for fetch, i in uses
        ]
        hosts = [[self._host(name, rows, grads[rows.parameter]) for name, rows in place] for place in places]
        self.window = Window(rank.device)
        slots, on_device = self.window.slots(hosts)
        self._transfers, made = list[Transfer](), list(views)
        for (fetch, bucket), place, tensors in zip(uses, places, on_device, strict=True):
            pairs = zip(place, tensors, strict=True)
            slot = {(name, rows.parameter, rows.start): (rows, tensor) for (name, rows), tensor in pairs}
            self._transfers.append(Transfer(fetch, bucket, slot))
            made[bucket] = self._in_slot(made[bucket], self._transfers[-1])
        self.views = tuple(made)
        self.memory = StepMemory(slots, kept=False)

    def _host(self, name: Name, rows: Rectangle, grad: Tensor | None) -> Tensor:
        stored = self._storage[rows.parameter]
        if name == "momentum":
            return rows.of_momentum(stored)
        return rows.of(stored.param if name == "params" else grad)

    def _in_slot(self, views: BucketViews, transfer: Transfer) -> BucketViews:
        names, field = [*chain(*self._kinds[transfer.fetch])], CALLS[transfer.fetch]
        calls = [
            replace(call, **{name: tuple(transfer.view(name, part) for part in call.parts) for name in names})
            for call in getattr(views, field)
        ]
        changed: dict[str, Any] = {field: tuple(calls)}
        return replace(views, **changed)

    def begin(self, gradients: StepGradients) -> None:
        self.memory.take()
        self.window.begin([list(self._copies_of(transfer, gradients)) for transfer in self._transfers])

    def _copies_of(self, transfer: Transfer, gradients: StepGradients) -> Iterator[Copied]:
        changed, _ = self._kinds[transfer.fetch]
        for (name, parameter, _), (rows, on_device) in transfer.slot.items():
            grad = gradients.grads[parameter]
            # The step decays a parameter without a gradient.
            if grad is not None if name != "params" else parameter not in gradients.excluded:
                yield Copied(on_device, self._host(name, rows, grad), name in changed)

    def fetched(self, fetch: Fetch) -> AbstractContextManager[None]:
        """Hold the next transfer on the device, if this work has transfers."""
        return self.window.fetched() if fetch in self._kinds else nullcontext()

    def end(self) -> None:
        self.window.end()
        self.memory.free()
        # The user may read parameters on the host after the step.
        if "update" in self._kinds:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all tensors are on the host."""
        self.window.synchronize()


def rows_used(calls: Iterable[MomentumCall | UpdateCall]) -> Iterable[Rectangle]:
    """The rows of these calls. Rectangles side by side share one range."""
    parts = [part for call in calls for part in call.parts]
    return {(part.parameter, part.start): part.rows for part in parts}.values()


class OffloadFeature(Feature):
    """Tensors on the host between steps."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for an overlap that needs tensors on the device, and for matrices that share rows."""
        options = context.options
        if options.overlap != "none" and (options.overlap, options.offload) != ("forward", "state"):
            remedy = "set 'none', or offload = 'none'"
            raise OptionError("overlap", f"= {options.overlap!r} needs momentum and parameters on the device; {remedy}")
        # Transfers move whole rows, so two transfers would overwrite common rows.
        if shared := next((parameter.fqn for parameter in context.parameters if parameter.stack.interleaved), None):
            problem = f"does not take {shared}, whose matrices share rows of its storage"
            raise OptionError("offload", f'= "{options.offload}" {problem}; set "none"')

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        parts.offload = offload = HostOffload(parts.rank, parts.views, parts.rank.options.offload)
        parts.views = offload.views
        parts.hooks.append(offload)
