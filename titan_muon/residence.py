"""Where a step finds momentum, gradients and parameters: on the device, or on the host, from where they come to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .offload import Load, Window
from .options import Offload
from .params import LocalViews
from .plan.layout import Span
from .plan.program import Program
from .plan.schedule import Act

Views = list[LocalViews | None]
"""Storage of each parameter in the plan's order; None for those that are left alone in this step."""

Stage = Literal["advance", "apply"]
Name = Literal["param", "average", "grad"]
"""A tensor of LocalViews."""
Key = tuple[Name, int, int]
"""Which tensor, of which parameter, from which row on."""


@dataclass(frozen=True)
class Taken:
    """What a stage takes from the host: tensors that it changes, which go back, and others."""

    changed: tuple[Name, ...]
    read: tuple[Name, ...] = ()


TAKEN: Mapping[Offload, Mapping[Stage, Taken]] = {
    "none": {},
    "state": {"advance": Taken(("average",))},
    "parameters": {"advance": Taken(("average",), ("grad",)), "apply": Taken(("param",))},
}


@dataclass(frozen=True)
class Use:
    """Rows of a parameter's local storage that are used together with those of others."""

    parameter: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class StageUse:
    """A stage of one bucket, or of one batch of matrices that are whole on this rank, and the rows that it uses."""

    stage: Stage
    uses: tuple[Use, ...]


class Resident:
    """All that a step uses stays on the device."""

    def begin(self, views: Views) -> None:
        """Start a step on these parameters."""

    @contextmanager
    def there(self, stage: Stage) -> Iterator[None]:
        """Meanwhile what the next stage of the step uses can be read and written."""
        yield

    def rectangle(self, name: Name, parameter: int, stored: LocalViews, span: Span) -> Tensor:
        """A rectangle of a parameter's local storage, of its momentum or of its gradient, to be changed in place."""
        tensor: Tensor = getattr(stored, name)
        return tensor[span.local]

    def end(self) -> None:
        """End the step."""

    def synchronize(self) -> None:
        """Have the host wait until what it may read is there."""


class Offloaded(Resident):
    """Some or all of it is on the host, of which a step has two loads at a time on the device.

    Args:
        stages: what is used together, in the order of the step.
        offload: what is on the host.
        window: where it comes to the device.
    """

    def __init__(self, stages: Iterable[StageUse], offload: Offload, window: Window) -> None:
        self._taken, self.window = TAKEN[offload], window
        self._stages = tuple(each for each in stages if each.stage in self._taken)
        self._names = {name for taken in self._taken.values() for name in (*taken.changed, *taken.read)}
        self._waiting: list[list[Key]] = []
        self._here: Mapping[Key, Tensor] = {}

    def begin(self, views: Views) -> None:
        """The first two loads come."""
        self._waiting, loads = [], []
        for each in self._stages:
            taken = self._taken[each.stage]
            changed, read = (_rows(views, names, each.uses) for names in (taken.changed, taken.read))
            self._waiting.append([*changed, *read])
            loads.append(Load(list(changed.values()), list(read.values())))
        self.window.begin(loads)

    @contextmanager
    def there(self, stage: Stage) -> Iterator[None]:
        """Meanwhile the next load is on the device; then what a stage changes goes back."""
        if stage not in self._taken:
            yield
            return
        self._here = dict(zip(self._waiting.pop(0), self.window.take(), strict=True))
        yield
        self._here = {}
        self.window.give_back()

    def rectangle(self, name: Name, parameter: int, stored: LocalViews, span: Span) -> Tensor:
        """A rectangle of it, in what is on the device now."""
        if name not in self._names:
            return super().rectangle(name, parameter, stored, span)
        rows, columns = span.local
        return self._here[name, parameter, rows.start][:, columns]

    def end(self) -> None:
        """What was changed last goes back."""
        self.window.end()
        # Parameters of the host are read there without another word, by a checkpoint for one.
        if "param" in self._names:
            self.window.synchronize()

    def synchronize(self) -> None:
        """Wait for what goes back."""
        self.window.synchronize()


def _rows(views: Views, names: Iterable[Name], uses: Iterable[Use]) -> dict[Key, Tensor]:
    """The rows of these tensors that are there: a parameter that is left alone has none, nor has a missing gradient."""
    return {
        (name, use.parameter, use.rows[0]): tensor[slice(*use.rows)]
        for name in names
        for use in uses
        if (tensor := getattr(views[use.parameter], name, None)) is not None
    }


def stage_uses(
    program: Program, at_home: Sequence[tuple[Use, ...]], in_buckets: Sequence[tuple[Use, ...]]
) -> Iterator[StageUse]:
    """What is used together, in the order of the step: by each batch at home, and by each bucket."""
    for act, number in program.turns:
        if act is Act.HOME:
            for uses in at_home:
                yield from (StageUse("advance", uses), StageUse("apply", uses))
        elif act is not Act.ORTHOGONALIZE:
            stage: Stage = "advance" if act is Act.GATHER else "apply"
            yield from (StageUse(stage, in_buckets[bucket]) for bucket in program.rounds[number])


def uses_of(pieces: Iterable[tuple[int, Sequence[Span]]]) -> tuple[Use, ...]:
    """The rows of pieces, (parameter, spans) each: rectangles beside each other are of the same rows."""
    # Whole rows, for they are contiguous: a copy of anything else from the host would wait for it.
    found = (Use(index, (s.local[0].start, s.local[0].stop)) for index, spans in pieces for s in spans)
    return tuple(dict.fromkeys(found))
