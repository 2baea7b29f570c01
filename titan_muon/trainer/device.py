"""Device-dependent choices of the integration.

A recipe can override each choice, so that tests on the CPU run the GPU's code.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from titan_muon.engine.tensors.dtensor import is_host
from titan_muon.kernels.dispatch import cpu_has_bfloat16
from titan_muon.trainer.recipe.degrees import has_torch_for

_planned: ContextVar[str | None] = ContextVar("planned device", default=None)

LOSS_CHUNKS = 8


def this_device() -> str:
    """Type of the device that this machine trains on. MPS has no collectives, so that Macs train on the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def on_accelerator() -> bool:
    """Whether this machine trains on an accelerator."""
    return this_device() != "cpu"


@contextmanager
def planning_for(device: str) -> Iterator[None]:
    """Context of a dry run for a type of device, present or not."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_device(actual: str) -> str:
    """Type of device to plan for: the dry run's, or else `actual`."""
    return _planned.get() or actual


def plans_for_host() -> bool:
    """Whether the device to plan for, or else this machine's, is the CPU."""
    return planned_device(this_device()) == "cpu"


def loss_chunks(option: int | Literal["auto"], tokens: int) -> int:
    """Chunks of the loss for a rank's `tokens` of a sequence."""
    if option != "auto":
        return option
    # On a GPU, logits can be the largest activation. On the CPU, a single product is faster.
    chunked = on_accelerator() and tokens % LOSS_CHUNKS == 0 and has_torch_for("loss.chunks")
    return LOSS_CHUNKS if chunked else 1


def passes_dtype(option: str, device: str) -> str:
    """Dtype of parameters in forward and backward on a type of device."""
    if option != "auto":
        return option
    # Without instructions for bfloat16, a CPU multiplies at a fiftieth of float32's rate.
    return "float32" if device == "cpu" and not cpu_has_bfloat16() else "bfloat16"


def adamw_implementation(option: str) -> str:
    """Implementation of AdamW."""
    if option != "auto":
        return option
    # On the CPU, torch's fused kernel is newer, and launches cost nothing.
    return "fused" if on_accelerator() else "foreach"


def pins_batches() -> bool:
    """Whether to pin batches, so that copies to the device do not block the host."""
    return torch.cuda.is_available()


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Context that restores the random state of the host and of `device`."""
    # torch always forks the host's state.
    return torch.random.fork_rng([] if is_host(device) else [device], device_type=device.type)


class Stopwatch(AbstractContextManager[None]):
    """Sums the time inside of the context in the work of a device, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Begin the context, or end it."""
        # The host runs ahead of an accelerator, so a clock would measure launches.
        if is_host(self._device):
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(torch.Event(device=self._device, enable_timing=True))
            self._marks[-1].record()

    def __enter__(self) -> None:
        self.mark()

    def __exit__(self, *error: object) -> None:
        self.mark()

    def take(self) -> float:
        """Seconds since the last call. Waits for the device."""
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=False))
        if is_host(self._device):
            return float(sum(end - begin for begin, end in pairs))
        # A stream completes events in order.
        for _, end in pairs[-1:]:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3
