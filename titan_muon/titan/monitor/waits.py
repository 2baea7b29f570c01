"""Exposed communication: the time in which a step of Muon waits for its exchanges."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from titan_muon.muon import Muon
from titan_muon.titan.device import now, seconds_between


class Waits(AbstractContextManager[None]):
    """Measures a step's waits on this rank, without a host wait. Includes waits hidden by `overlap = "forward"`."""

    def __init__(self, muons: Sequence[Muon], device: torch.device) -> None:
        self._muons, self._device = muons, device
        self._times: list[torch.Event | float] = []

    def begin(self) -> None:
        self._times = []
        for muon in self._muons:
            muon.exchange.timer = self

    def end(self) -> float:
        """Milliseconds since `begin`; the caller has waited for the device."""
        for muon in self._muons:
            muon.exchange.timer = nullcontext()
        return 1e3 * sum(map(seconds_between, self._times[::2], self._times[1::2]))

    def __enter__(self) -> None:
        self._times.append(now(self._device))

    def __exit__(self, *error: object) -> None:
        self._times.append(now(self._device))
