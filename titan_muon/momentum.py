"""Where a step finds the momentum: on the device, or on the host, from where it comes bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .offload import Window
from .params import Gradients, Storage
from .parts import Advance, Part
from .plan.layout import Span
from .update import Tensors


@dataclass(frozen=True)
class Use:
    """Rows of a parameter's local storage whose momentum is advanced together with that of others."""

    parameter: int
    rows: tuple[int, int]


class Momentum:
    """Momentum that stays on the device."""

    def begin(self, gradients: Gradients) -> None:
        """Start a step with these gradients."""

    @contextmanager
    def there(self) -> Iterator[None]:
        """Meanwhile the momentum that is used next in the step can be read and written."""
        yield

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, to be advanced in place."""
        return advance.averages

    def end(self) -> None:
        """End the step."""

    def synchronize(self) -> None:
        """Have the host wait until what it may read is there."""


class OffloadedMomentum(Momentum):
    """Momentum on the host, of which a step has two loads at a time on the device.

    Args:
        uses: what is advanced together, in the order of the step.
        storage: where the momentum of each parameter is on the host.
        device: device that advances it.
    """

    def __init__(self, uses: Sequence[Sequence[Use]], storage: Sequence[Storage], device: torch.device) -> None:
        self._uses, self._storage, self.window = tuple(uses), storage, Window(device)
        self._waiting: list[list[Use]] = []
        self._here: Mapping[tuple[int, int], Tensor] = {}

    def begin(self, gradients: Gradients) -> None:
        """The first two loads come."""
        self._waiting = [[use for use in uses if gradients.stored[use.parameter] is not None] for uses in self._uses]
        self.window.begin(
            [[self._storage[use.parameter].average[slice(*use.rows)] for use in uses] for uses in self._waiting]
        )

    @contextmanager
    def there(self) -> Iterator[None]:
        """Meanwhile the next load is on the device; then it goes back."""
        uses = self._waiting.pop(0)
        self._here = {(u.parameter, u.rows[0]): rows for u, rows in zip(uses, self.window.take(), strict=True)}
        yield
        self._here = {}
        self.window.give_back()

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, in what is on the device now."""
        return [self._of(part) for part in advance.parts]

    def _of(self, part: Part) -> Tensor:
        if isinstance(part.place, tuple):
            rows, columns = part.place
            return self._here[part.parameter, rows.start][:, columns]
        return self._here[part.parameter, 0 if part.place is None else part.place.start]

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
