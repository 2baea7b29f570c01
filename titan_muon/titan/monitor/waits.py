"""Exposed communication: the time in which a step of Muon waits for its exchanges."""

from collections.abc import Callable, Sequence

import torch

from titan_muon.muon import Muon
from titan_muon.titan.device import now, seconds_between


class Waits:
    """Measures a step's waits on this rank, without a host wait. Includes waits hidden by `overlap = "forward"`."""

    def __init__(self, muons: Sequence[Muon], device: torch.device) -> None:
        self._muons, self._device = muons, device
        self._pairs: list[tuple[torch.Event | float, torch.Event | float]] = []

    def begin(self) -> None:
        self._pairs = []
        for muon in self._muons:
            muon.exchange.wait = self._timed(muon.exchange.wait)  # type: ignore[assignment, method-assign]

    def end(self) -> float:
        """Milliseconds since `begin`; the caller has waited for the device."""
        for muon in self._muons:
            del muon.exchange.wait
        return 1e3 * sum(seconds_between(begin, end) for begin, end in self._pairs)

    def _timed(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        def timed(index: int) -> None:
            begin = now(self._device)
            wait(index)
            self._pairs.append((begin, now(self._device)))

        return timed
