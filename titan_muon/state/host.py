"""Offload of tensors to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Offload
from ..tensors.device import is_host
from ..tensors.dtensor import copy_rows, local, step_device, storage_device
from ..tensors.mesh import StateMesh, refuse_reads_outside

TRANSFERS_AT_ONCE = 2
"""One transfer is in use while the next arrives or the last leaves."""

ALIGNMENT = 64
"""Bytes, for different dtypes and vectorized kernels."""

# [Note: transfers and slots]
# - A transfer holds host tensors for one use, for example the momentum of a bucket. Transfers alternate between the
#   slots, which are device buffers.
# - Slots are allocated on the computing stream. So the arriving stream first waits for earlier uses of the memory, and
#   for the last step's transfers to the host.
# - A transfer leaves after the computing stream has used the tensors. Then a later transfer reuses the slot.
# - At the end the computing stream waits for all transfers.


@dataclass(frozen=True)
class Transfer:
    """Contiguous host tensors. The `changed` tensors move back."""

    changed: Sequence[Tensor]
    read: Sequence[Tensor] = ()

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [*self.changed, *self.read]

    @property
    def bytes(self) -> int:
        return sum(slot_bytes(tensor) for tensor in self.tensors)


class Window:
    """Device memory for host tensors, see [Note: transfers and slots]. On a CPU the copies run too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._arriving, self._leaving = self._module.Stream(), self._module.Stream()
        self._transfers: dict[int, Transfer] = {}
        self._arrived: dict[int, tuple[list[Tensor], Any]] = {}
        self._used = 0
        self.slots: tuple[Tensor, ...] = ()

    def begin(self, transfers: Sequence[Transfer]) -> None:
        # An exception in the last step may have left the window open.
        self.end()
        self._transfers, self._used = dict(enumerate(transfers)), 0
        size = max((transfer.bytes for transfer in transfers), default=0)
        count = min(TRANSFERS_AT_ONCE, len(transfers))
        self.slots = tuple(torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count))
        self._arriving.wait_stream(self._current)
        for number in range(count):
            self._fetch(number)

    def take(self) -> list[Tensor]:
        """The next transfer. The computing stream waits for the arrival."""
        tensors, event = self._arrived[self._used]
        self._current.wait_event(event)
        return tensors

    def give_back(self) -> None:
        """Send the changed tensors back, and fetch a later transfer into the slot."""
        (tensors, _), transfer = self._arrived.pop(self._used), self._transfers.pop(self._used)
        self._leaving.wait_stream(self._current)
        with self._module.stream(self._leaving):
            for host, on_device in zip(transfer.changed, tensors, strict=False):
                host.copy_(on_device, non_blocking=True)
        later = self._used + len(self.slots)
        self._used += 1
        if later in self._transfers:
            self._arriving.wait_stream(self._leaving)
            self._fetch(later)

    def end(self) -> None:
        """Free the slots after the transfers to the host."""
        self._current.wait_stream(self._leaving)
        self._current.wait_stream(self._arriving)
        self._arrived.clear()
        self._transfers.clear()
        self.slots = ()

    def synchronize(self) -> None:
        self._module.synchronize()

    @property
    def _current(self) -> Any:
        return self._module.current_stream()

    def _fetch(self, number: int) -> None:
        transfer, slot = self._transfers[number], self.slots[number % len(self.slots)]
        with self._module.stream(self._arriving):
            tensors = list(carved(slot, transfer.tensors))
            for on_device, host in zip(tensors, transfer.tensors, strict=True):
                on_device.copy_(host, non_blocking=True)
        self._arrived[number] = tensors, self._arriving.record_event()


def slot_bytes(tensor: Tensor) -> int:
    """Bytes with alignment."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def carved(slot: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of a slot with the shapes and dtypes of the tensors."""
    start = 0
    for tensor in tensors:
        yield slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += slot_bytes(tensor)


def resolved(chosen: Offload, parameters: Iterable[Tensor]) -> Offload:
    """The chosen offload, or "parameters" if FSDP's CPUOffloadPolicy keeps a parameter on the host."""
    offloaded = any(storage_device(parameter).type != step_device(parameter).type for parameter in parameters)
    return "parameters" if offloaded else chosen


def moves(now: Offload, to: Offload) -> bool:
    """Whether states have to move. Raises ValueError for a reload with parameters on the host."""
    if now == "parameters" and to == "none":
        raise ValueError("reload: the parameters are on the host (CPUOffloadPolicy), and so must be the states")
    return now not in (to, "parameters")


def host_bytes(size: int, device: str) -> int:
    """Host memory for a tensor. PyTorch pins memory for a GPU in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size


def new_state(parameter: Tensor, dtype: torch.dtype, offload: Offload, like: Tensor | None = None) -> Tensor:
    """A state of zeros, placed like the parameter or `like`; pinned if on the host."""
    like = parameter if like is None else like
    if offload == "none":
        state = torch.zeros_like(like, dtype=dtype, device=storage_device(parameter))
    else:
        # Copies are asynchronous only from pinned memory, and pinning needs an accelerator.
        pinned = not is_host(step_device(parameter))
        state = torch.zeros_like(like, dtype=dtype, device="cpu", pin_memory=pinned)
    if isinstance(state, DTensor) and isinstance(state.device_mesh, StateMesh):
        refuse_reads_outside(state, StateMesh.refusal)
    copy_rows(parameter, state)
    return state


def moved_state(state: Tensor, parameter: Tensor, offload: Offload) -> Tensor:
    """A copy of a state, on the device or the host as `new_state`."""
    moved = new_state(parameter, state.dtype, offload, state)
    local(moved).copy_(local(state))
    return moved
