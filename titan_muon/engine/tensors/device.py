"""Differences between device types."""

from __future__ import annotations

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """Whether the host computes on the device, so that reading a tensor does not wait, and copies need no pinning."""
    return device.type == "cpu"


def current_device(kind: str) -> torch.device:
    """This process's device of a type."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without a wait of the host."""
    return tensor if is_host(device) else tensor.pin_memory().to(device, non_blocking=True)


def host_zeros(like: Tensor) -> Tensor:
    """Host memory for copies of a tensor; pinned for a device, so that copies do not wait."""
    return torch.zeros_like(like, device="cpu", pin_memory=not is_host(like.device))


def may_be_true(flags: Tensor) -> bool:
    """Whether a flag is true, or unknown because reading the device would wait."""
    return not is_host(flags.device) or bool(flags.any())


def host_bytes(size: int, device: str) -> int:
    """Host memory for a tensor. PyTorch pins memory for a GPU in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size
