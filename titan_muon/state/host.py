"""Tensors that live on the host, and the window of the device in which they take turns in a step.

Device memory holds two transfers at one time, never all of them: one is used while the next comes and the last goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..options import MuonOptions, Offload, OptionError
from ..plan.terms.types import Parameter, Plan
from ..tensors.dtensor import local, step_device, storage_device

TRANSFERS_AT_ONCE = 2
"""Transfers that the device holds at one time."""

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in a slot: their dtypes differ, and kernels read several elements at once."""

# [Note: a transfer and its slot]
# - A transfer is what is used together: the momentum of a bucket, for one. They come in the order of the step, so the
#   one after next takes the slot of the one that has just been used.
# - Slots are memory of the computing stream, which may still read what was there before: the arriving stream waits for
#   it at the beginning. It also waits, through it, for what the last step sent back to the host.
# - A transfer goes back once the computing stream is done with it, and the next one takes its slot once it has gone.
# - The computing stream waits for all that leaves at the end. Then the slots are freed, and what it allocates next may
#   be their memory.


@dataclass(frozen=True)
class Transfer:
    """Contiguous tensors of the host that come to the device together. Those that are `changed` there go back."""

    changed: Sequence[Tensor]
    read: Sequence[Tensor] = ()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All of them, those that are changed first."""
        return [*self.changed, *self.read]

    @property
    def bytes(self) -> int:
        """What they take on the device."""
        return sum(slot_bytes(tensor) for tensor in self.tensors)


class Window:
    """Device memory through which tensors of the host pass in a step, transfer by transfer, on streams of their own.

    On the CPU the streams do nothing, and the same copies are made in the same order.

    Args:
        device: device on which the transfers are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._arriving, self._leaving = self._module.Stream(), self._module.Stream()
        self._transfers: dict[int, Transfer] = {}
        self._here: dict[int, tuple[list[Tensor], Any]] = {}
        self._used = 0
        self.slots: tuple[Tensor, ...] = ()

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start a step that uses these transfers in this order. The first ones come."""
        # An exception in the step before may have left it open.
        self.end()
        self._transfers, self._used = dict(enumerate(transfers)), 0
        size = max((transfer.bytes for transfer in transfers), default=0)
        count = min(TRANSFERS_AT_ONCE, len(transfers))
        self.slots = tuple(torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count))
        self._arriving.wait_stream(self._current)
        for number in range(count):
            self._fetch(number)

    def take(self) -> list[Tensor]:
        """The tensors of the next transfer, on the device. What is computed with them waits until they are there."""
        here, arrived = self._here[self._used]
        self._current.wait_event(arrived)
        return here

    def give_back(self) -> None:
        """Send what changed of the transfer that was taken last to the host, and have another one come in its place."""
        (here, _), transfer = self._here.pop(self._used), self._transfers.pop(self._used)
        self._leaving.wait_stream(self._current)
        with self._module.stream(self._leaving):
            for host, there in zip(transfer.changed, here, strict=False):
                host.copy_(there, non_blocking=True)
        coming = self._used + len(self.slots)
        self._used += 1
        if coming in self._transfers:
            self._arriving.wait_stream(self._leaving)
            self._fetch(coming)

    def end(self) -> None:
        """Free the window, behind what is still on its way to the host."""
        self._current.wait_stream(self._leaving)
        self._current.wait_stream(self._arriving)
        self._here.clear()
        self._transfers.clear()
        self.slots = ()

    def synchronize(self) -> None:
        """Have the host wait until all that left is there, before it reads it."""
        self._module.synchronize()

    @property
    def _current(self) -> Any:
        return self._module.current_stream()

    def _fetch(self, number: int) -> None:
        transfer, slot = self._transfers[number], self.slots[number % len(self.slots)]
        with self._module.stream(self._arriving):
            here = list(carved(slot, transfer.tensors))
            for there, host in zip(here, transfer.tensors, strict=True):
                there.copy_(host, non_blocking=True)
        self._here[number] = here, self._arriving.record_event()


def slot_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor up to where the next one may begin."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def carved(slot: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Parts of a slot with the shapes and dtypes of some tensors, one after the other."""
    start = 0
    for tensor in tensors:
        yield slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += slot_bytes(tensor)


def resolved(chosen: Offload, parameters: Iterable[Tensor]) -> Offload:
    """What is on the host: what was chosen, or parameters too where FSDP's CPUOffloadPolicy keeps them."""
    apart = any(storage_device(parameter).type != step_device(parameter).type for parameter in parameters)
    return "parameters" if apart else chosen


def moves(now: Offload, to: Offload) -> bool:
    """Whether states have to be moved. Raises ValueError for those of parameters that are on the host themselves."""
    if now == "parameters" and to == "none":
        raise ValueError("reload: the parameters are on the host (CPUOffloadPolicy), and their states stay with them")
    return now not in (to, "parameters")


def host_bytes(size: int, device: str) -> int:
    """What a tensor of `size` bytes takes on the host: pinned for a GPU, which PyTorch allocates in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size


def new_state(parameter: Tensor, dtype: torch.dtype, offload: Offload) -> Tensor:
    """A state of zeros, placed as its parameter is, so that a checkpoint reshards both alike; pinned on the host."""
    # Made where it stays: all states at once may be more than the device has room for.
    if offload == "none":
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros_like(parameter, dtype=dtype, device="cpu", pin_memory=_pins(parameter))


def state_like(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype, offload: Offload) -> Tensor:
    """A plain tensor of zeros on the device, or the host, that `new_state` would be on."""
    if offload == "none":
        return torch.zeros(shape, dtype=dtype, device=storage_device(parameter))
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=_pins(parameter))


def _pins(parameter: Tensor) -> bool:
    # Only from pinned memory does a copy run beside the host, and pinned memory takes a device to pin it for.
    return step_device(parameter).type != "cpu"


def check_offload(parameters: Iterable[Parameter], options: MuonOptions) -> None:
    """Raise OptionError if one of these parameters cannot be where the options say."""
    # What comes from the host are whole rows, and goes back as it came. Of interleaved matrices two transfers would
    # have the same rows, and the one that goes back last would undo what the other did to them.
    shared = next((parameter.fqn for parameter in parameters if parameter.stack.interleaved), None)
    if options.offload != "none" and shared is not None:
        raise OptionError(
            "offload",
            f'= "{options.offload}" does not take {shared}, whose matrices share rows of its storage; set "none"',
        )


def with_offload(plan: Plan, options: MuonOptions, to: Offload) -> MuonOptions:
    """The options of a plan with its momentum elsewhere. Raises OptionError if it cannot be there."""
    moved = replace(options, offload=to)
    check_offload(plan.parameters, moved)
    return moved


def moved_state(state: Tensor, parameter: Tensor, offload: Offload) -> Tensor:
    """A copy of a state on the host, or where its parameter is."""
    moved = new_state(parameter, state.dtype, offload)
    local(moved).copy_(local(state))
    return moved
