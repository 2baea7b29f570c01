"""Exposed communication: the time in which a step of Muon waits for its exchanges."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from titan_muon.muon import Muon


class Waits:
    """Measures the waits of one step on this rank: by events of the device, or by the clock on a CPU.

    The host does not wait. `overlap = "forward"` hides its last waits, and a measured step does not.
    """

    def __init__(self, muons: Sequence[Muon], device: torch.device) -> None:
        self._muons, self._on_device = muons, device.type != "cpu"
        self._module: Any = torch.get_device_module(device)
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Measure from now on."""
        self._pairs = []
        for muon in self._muons:
            muon.exchange.wait = self._timed(muon.exchange.wait)  # type: ignore[assignment, method-assign]

    def end(self) -> float:
        """Stop to measure. Milliseconds since `begin`; the caller has waited for the device."""
        for muon in self._muons:
            del muon.exchange.wait
        if not self._on_device:
            return sum(1e3 * (end - begin) for begin, end in self._pairs)
        return sum(begin.elapsed_time(end) for begin, end in self._pairs)

    def _timed(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        def timed(index: int) -> None:
            begin = self._mark()
            wait(index)
            self._pairs.append((begin, self._mark()))

        return timed

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event
