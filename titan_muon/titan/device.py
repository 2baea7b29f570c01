"""Device-dependent choices of the integration, with reasons.

A recipe can override each choice, so that tests on the CPU run the GPU's code. Kernels choose on their own
(`titan_muon/orthogonalize/dispatch.py`, `model/attention.py`, `model/logits.py`), and `compat.py` closes gloo's gaps.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

_planned: ContextVar[str | None] = ContextVar("planned device", default=None)

LOSS_CHUNKS = 8
"""Chunks of the loss on a GPU; TorchTitan's own number."""


def on_accelerator() -> bool:
    """Whether this machine has an accelerator."""
    return torch.accelerator.is_available()


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of this process's GPU, NVIDIA's or AMD's; None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def arrives_late(device: torch.device) -> bool:
    """Whether the host learns a number of the device only after an asynchronous copy."""
    return device.type != "cpu"


@contextmanager
def planning_for(device: str) -> Iterator[None]:
    """Context of a dry run for `device`, a type of device, present or not."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_device(actual: str) -> str:
    """Type of device to plan for: `actual`, unless a dry run plans for another."""
    return _planned.get() or actual


def loss_chunks(chosen: int | Literal["auto"], tokens: int) -> int:
    """Chunks of the loss for a rank's `tokens` of a sequence (`loss.chunks`, resolved)."""
    if chosen != "auto":
        return chosen
    # The logits can be the largest activation on a GPU. On the CPU memory is no problem, and one product is faster than
    # eight. Chunks have equal lengths.
    return LOSS_CHUNKS if on_accelerator() and tokens % LOSS_CHUNKS == 0 else 1


def adamw_implementation(chosen: str) -> str:
    """Implementation of AdamW (`optimizer.implementation`, resolved)."""
    if chosen != "auto":
        return chosen
    # A single kernel for all tensors on a GPU. On the CPU torch's fused kernel is newer, and launches cost nothing.
    return "fused" if on_accelerator() else "foreach"


def pins_batches() -> bool:
    """Whether batches are pinned: only then do copies to a CUDA device not block the host."""
    return torch.cuda.is_available()


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Context that restores the random state of the host and of `device`."""
    # torch always forks the host's state, and an accelerator's only by name.
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def now(device: torch.device) -> torch.Event | float:
    """Point in time in the work of `device`, for `seconds_between`."""
    # The host runs ahead of an accelerator: a clock would measure launches, and reading an event would block the host.
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: torch.Event | float, end: torch.Event | float) -> float:
    """Seconds between two past points in time of a device."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float), "two moments of one device are of one kind"
    assert isinstance(end, float), "two moments of one device are of one kind"
    return end - start
