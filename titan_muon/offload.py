"""Optimizer states that live on the host, and the window of the device in which they take turns in a step.

Device memory holds two loads at one time, never all states: one is used while the next one comes and the last one goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .dtensor import local, storage_device

LOADS_AT_ONCE = 2
"""Loads that the device holds at one time."""

# [Note: a load and its slot]
# - A load is what is used together: the momentum of a bucket, for one. Loads come in the order of the step, so the one
#   after next takes the slot of the one that has just been used.
# - Slots are memory of the computing stream, which may still read what was there before: the arriving stream waits for
#   it at the beginning. It also waits, through it, for what the last step sent back to the host.
# - A load goes back once the computing stream is done with it, and the next one takes its slot once it has gone back.
# - The computing stream waits for all that leaves at the end. Then the slots are freed, and what it allocates next may
#   be their memory.


class Window:
    """Device memory through which tensors of the host pass in a step, load by load, on streams of their own.

    On the CPU the streams do nothing, and the same copies are made in the same order.

    Args:
        device: device on which the loads are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._arriving, self._leaving = self._module.Stream(), self._module.Stream()
        self._loads: tuple[Sequence[Tensor], ...] = ()
        self._here: dict[int, tuple[list[Tensor], Any]] = {}
        self._used = 0
        self.slots: tuple[Tensor, ...] = ()

    def begin(self, loads: Sequence[Sequence[Tensor]]) -> None:
        """Start a step that uses these loads in this order: contiguous tensors of the host. The first ones come."""
        # An exception in the step before may have left it open.
        self.end()
        self._loads, self._used = tuple(loads), 0
        size = max((load_bytes(load) for load in self._loads), default=0)
        count = min(LOADS_AT_ONCE, len(self._loads))
        self.slots = tuple(torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count))
        self._arriving.wait_stream(self._current)
        for number in range(count):
            self._fetch(number)

    def take(self) -> list[Tensor]:
        """The next load, on the device. What is computed with it waits until it is there."""
        here, arrived = self._here[self._used]
        self._current.wait_event(arrived)
        return here

    def give_back(self) -> None:
        """Send the load that was taken last back to the host, and have another one come in its place."""
        here, _ = self._here.pop(self._used)
        self._leaving.wait_stream(self._current)
        with self._module.stream(self._leaving):
            for host, there in zip(self._loads[self._used], here, strict=True):
                host.copy_(there, non_blocking=True)
        coming = self._used + len(self.slots)
        self._used += 1
        if coming < len(self._loads):
            self._arriving.wait_stream(self._leaving)
            self._fetch(coming)

    def end(self) -> None:
        """Free the window, behind what is still on its way to the host."""
        self._current.wait_stream(self._leaving)
        self._current.wait_stream(self._arriving)
        self._here.clear()
        self._loads = self.slots = ()

    def synchronize(self) -> None:
        """Have the host wait until all that left is there, before it reads it."""
        self._module.synchronize()

    @property
    def _current(self) -> Any:
        return self._module.current_stream()

    def _fetch(self, number: int) -> None:
        load, slot = self._loads[number], self.slots[number % len(self.slots)]
        with self._module.stream(self._arriving):
            here = list(carved(slot, load))
            for there, host in zip(here, load, strict=True):
                there.copy_(host, non_blocking=True)
        self._here[number] = here, self._arriving.record_event()


def load_bytes(load: Sequence[Tensor]) -> int:
    """Bytes that a load takes on the device."""
    return sum(tensor.nbytes for tensor in load)


def carved(slot: Tensor, load: Sequence[Tensor]) -> Iterator[Tensor]:
    """Parts of a slot with the shapes and dtypes of a load, one after the other."""
    start = 0
    for tensor in load:
        yield slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes


def host_bytes(size: int, device: str) -> int:
    """What `size` bytes of a state take on the host: pinned for a GPU, which PyTorch allocates in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size


def new_state(parameter: Tensor, dtype: torch.dtype, *, on_host: bool) -> Tensor:
    """A state of zeros, placed as its parameter is, so that a checkpoint reshards both alike; pinned on the host."""
    # Made where it stays: all states at once may be more than the device has room for.
    if not on_host:
        return torch.zeros_like(parameter, dtype=dtype)
    # Only from pinned memory does a copy run beside the host, and pinned memory takes a device to pin it for.
    pinned = storage_device(parameter).type != "cpu"
    return torch.zeros_like(parameter, dtype=dtype, device="cpu", pin_memory=pinned)


def moved_state(state: Tensor, parameter: Tensor, *, on_host: bool) -> Tensor:
    """A copy of a state on the host, or where its parameter is."""
    moved = new_state(parameter, state.dtype, on_host=on_host)
    local(moved).copy_(local(state))
    return moved
