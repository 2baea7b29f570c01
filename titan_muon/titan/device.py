"""Every choice of the integration that depends on the device, with its reason.

A recipe can make each of them itself, so that the tests train on the CPU with what GPUs train with. Kernels choose for
themselves (`titan_muon/orthogonalize/dispatch.py`, `model/attention.py`, `model/logits.py`), and gaps of gloo are
closed in `compat.py`.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

_planned: ContextVar[str | None] = ContextVar("planned device", default=None)

LOSS_CHUNKS = 8
"""Pieces of the sequence whose logits exist at one time on a GPU; TorchTitan's own number."""


def on_accelerator() -> bool:
    """Whether this machine trains on a GPU, and not on the CPU."""
    return torch.accelerator.is_available()


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of this process's GPU, NVIDIA's or AMD's; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@contextmanager
def planning_for(device: str) -> Iterator[None]:
    """Meanwhile plan for a type of device that this machine need not have, as a dry run does."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_device(found: str) -> str:
    """The type of device that is planned for: the one that was `found`, but in a dry run."""
    return _planned.get() or found


def loss_chunks(chosen: int | Literal["auto"], tokens: int) -> int:
    """Pieces that the loss takes a rank's `tokens` of a sequence in: `loss.chunks`, resolved. 1 is all at once."""
    if chosen != "auto":
        return chosen
    # All logits at once can be the largest activation on a GPU. On the CPU memory is not short, and one matrix product
    # is faster than eight. A length that 8 does not divide could not be cut into equal pieces.
    return LOSS_CHUNKS if on_accelerator() and tokens % LOSS_CHUNKS == 0 else 1


def adamw_implementation(chosen: str) -> str:
    """How AdamW runs: `optimizer.implementation`, resolved."""
    if chosen != "auto":
        return chosen
    # One kernel for all tensors on a GPU. On the CPU torch's fused kernel is the newer path, and launches cost nothing.
    return "fused" if on_accelerator() else "foreach"


def pins_batches() -> bool:
    """Whether batches are put in pinned memory: only from there does a copy to a CUDA device run beside the host."""
    return torch.cuda.is_available()


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the random state of the host and of `device` is what it was."""
    # The host's state is forked always, and an accelerator's only where it is named.
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def now(device: torch.device) -> torch.Event | float:
    """A moment in the work of `device`, which `seconds_between` compares."""
    # The host runs ahead of an accelerator: a clock would measure the time to launch kernels, and reading an event at
    # once would have the host wait for the device.
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: torch.Event | float, end: torch.Event | float) -> float:
    """Seconds from one moment of a device to a later one, which it must have reached."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float), "two moments of one device are of one kind"
    assert isinstance(end, float), "two moments of one device are of one kind"
    return end - start
