"""Where a step finds the momentum: on the device, or on the host, from where it comes bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .offload import Window
from .params import LocalViews
from .plan.layout import Span

Views = list[LocalViews | None]
"""Storage of each parameter in the plan's order; None for those that are left alone in this step."""


@dataclass(frozen=True)
class Use:
    """Rows of a parameter's local storage whose momentum is advanced together with that of others."""

    parameter: int
    rows: tuple[int, int]


class Momentum:
    """Momentum that stays on the device."""

    def begin(self, views: Views) -> None:
        """Start a step on these parameters."""

    @contextmanager
    def there(self) -> Iterator[None]:
        """Meanwhile the momentum that is used next in the step can be read and written."""
        yield

    def rectangle(self, parameter: int, stored: LocalViews, span: Span) -> Tensor:
        """The momentum of a rectangle of a parameter's local storage, to be advanced in place."""
        return stored.average[span.local]

    def end(self) -> None:
        """End the step."""

    def synchronize(self) -> None:
        """Have the host wait until what it may read is there."""


class OffloadedMomentum(Momentum):
    """Momentum on the host, of which a step has two loads at a time on the device.

    Args:
        uses: what is advanced together, in the order of the step.
        device: device that advances it.
    """

    def __init__(self, uses: Sequence[Sequence[Use]], device: torch.device) -> None:
        self._uses, self.window = tuple(uses), Window(device)
        self._waiting: list[list[Use]] = []
        self._here: Mapping[tuple[int, int], Tensor] = {}

    def begin(self, views: Views) -> None:
        """The first two loads come."""
        self._waiting, loads = [], []
        for uses in self._uses:
            stored = [(use, view) for use in uses if (view := views[use.parameter]) is not None]
            self._waiting.append([use for use, _ in stored])
            loads.append([view.average[slice(*use.rows)] for use, view in stored])
        self.window.begin(loads)

    @contextmanager
    def there(self) -> Iterator[None]:
        """Meanwhile the next load is on the device; then it goes back."""
        uses = self._waiting.pop(0)
        self._here = {(u.parameter, u.rows[0]): rows for u, rows in zip(uses, self.window.take(), strict=True)}
        yield
        self._here = {}
        self.window.give_back()

    def rectangle(self, parameter: int, stored: LocalViews, span: Span) -> Tensor:
        """The momentum of a rectangle, in what is on the device now."""
        rows, columns = span.local
        return self._here[parameter, rows.start][:, columns]

    def end(self) -> None:
        """What was advanced last goes back."""
        self.window.end()

    def synchronize(self) -> None:
        """Wait for what goes back."""
        self.window.synchronize()


def uses_of(pieces: Sequence[tuple[int, Sequence[Span]]]) -> tuple[Use, ...]:
    """The rows of pieces, (parameter, spans) each: rectangles beside each other are of the same rows."""
    # Whole rows, for they are contiguous: a copy of anything else from the host would wait for it.
    found = (Use(index, (s.local[0].start, s.local[0].stop)) for index, spans in pieces for s in spans)
    return tuple(dict.fromkeys(found))
