"""Splits the time of a training step into phases without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward_backward", "clip", "optimizer")


class StepTimer:
    """Seconds spent in each phase of the steps since the last `drain()`.

    On the CPU a phase is measured with the clock. On an accelerator its start and end are events on the current
    stream, which are read only in `drain()`.
    """

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
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    def drain(self) -> dict[str, float]:
        """Seconds of each phase, over all steps since the last call; waits for the device's last event."""
        spans, self._spans = self._spans, []
        if spans and isinstance(spans[-1][2], torch.Event):
            spans[-1][2].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            if isinstance(start, torch.Event):
                assert isinstance(end, torch.Event), "a span begins and ends in the same kind of time"
                seconds[name] += start.elapsed_time(end) / 1e3
            else:
                assert not isinstance(end, torch.Event), "a span begins and ends in the same kind of time"
                seconds[name] += end - start
        return dict(seconds)
