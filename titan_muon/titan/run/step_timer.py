"""Time of the phases of a training step, measured without waiting for the device."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_muon.titan.device import now, seconds_between

PHASES = ("data", "forward_backward", "clip", "optimizer")


class StepTimer:
    """Seconds per phase, by the clock or by events on a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, torch.Event | float, torch.Event | float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end()

    def begin(self, name: str) -> None:
        assert name in PHASES, f"unknown phase {name}"
        self._open = (name, now(self.device))

    def end(self) -> None:
        name, start = self._open
        self._spans.append((name, start, now(self.device)))

    def drain(self) -> dict[str, float]:
        """Seconds of each phase since the last call. Waits for the device."""
        spans, self._spans = self._spans, []
        # A stream completes events in order.
        if spans and isinstance(spans[-1][2], torch.Event):
            spans[-1][2].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += seconds_between(start, end)
        return dict(seconds)
