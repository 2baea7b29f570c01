"""Which parameters had a matrix that was not finite, told to the host without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Alarm:
    """Counts on the device, copied to the host at the end of each step and read at the beginning of the next.

    Args:
        parameters: number of them.
        device: where matrices are orthogonalized.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        self._counts = torch.zeros(parameters, dtype=torch.int32, device=device)
        self._waits = device.type != "cpu"
        self._told = torch.zeros(parameters, dtype=torch.int32, pin_memory=True) if self._waits else self._counts
        self._sent = torch.Event(device) if self._waits else None

    def add(self, parameters: Tensor, broken: Tensor) -> None:
        """Count matrices, (count,) bool, for their parameters, (count,) int64 indices on the device."""
        self._counts.index_add_(0, parameters, broken.to(torch.int32))

    def send(self) -> None:
        """Start the copy to the host."""
        if self._sent is not None:
            self._told.copy_(self._counts, non_blocking=True)
            self._sent.record()

    def read(self) -> list[int]:
        """Matrices that were not finite since the last `clear`, by parameter, as of the last `send`."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._told.tolist()

    def clear(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()
        self._told.zero_()
