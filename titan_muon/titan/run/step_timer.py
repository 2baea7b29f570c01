"""Splits the time of a training step into phases without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("data", "forward_backward", "clip", "optimizer")


class StepTimer:
    """Seconds spent in each phase of the steps since the last `drain()`, on the clock or between events on a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, torch.Event | float, torch.Event | float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside, as a part of phase `name`."""
        assert name in PHASES, f"unknown phase {name}"
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def _mark(self) -> torch.Event | float:
        # The host runs ahead of an accelerator: a clock would measure the time to launch kernels, and reading an event
        # at once would have the host wait for the device in each phase.
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    def drain(self) -> dict[str, float]:
        """Seconds of each phase, over all steps since the last call; waits for the device's last event."""
        spans, self._spans = self._spans, []
        # A stream passes its events in order, so all before the last have passed too.
        if spans and isinstance(spans[-1][2], torch.Event):
            spans[-1][2].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += _seconds_between(start, end)
        return dict(seconds)


def _seconds_between(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3 if isinstance(start, torch.Event) else end - start
