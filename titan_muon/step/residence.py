"""Where a step finds momentum, gradients and parameters: on the device, or on the host, from where they come to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..options import Offload
from ..plan.program import Program
from ..plan.terms.schedule import Act
from ..state.host import Transfer, Window
from ..tensors.storage import Storage
from .foreach import Advance, Apply, Part
from .gradients import Gradients
from .update import Tensors

Stage = Literal["advance", "apply"]
Name = Literal["param", "average", "grad"]
"""A tensor of a parameter."""
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
class StageUse:
    """A stage of one bucket, or of one batch of matrices that are whole on this rank, and the rows that it uses."""

    stage: Stage
    rows: tuple[Part, ...]


class Resident:
    """All that a step uses stays on the device."""

    def begin(self, gradients: Gradients) -> None:
        """Start a step with these gradients."""

    @contextmanager
    def there(self, stage: Stage) -> Iterator[None]:
        """Meanwhile what the next stage of the step uses can be read and written."""
        yield

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, to be advanced in place."""
        return advance.averages

    def grads(self, advance: Advance, gradients: Gradients) -> Tensors:
        """The gradients of the parts."""
        return [part.of(gradients.stored[part.parameter]) for part in advance.parts]

    def params(self, apply: Apply) -> Tensors:
        """The parts of the parameters, to be updated in place."""
        return apply.params

    def end(self) -> None:
        """End the step."""

    def synchronize(self) -> None:
        """Have the host wait until what it may read is there."""


class Offloaded(Resident):
    """Some or all of it is on the host, of which a step has two transfers at a time on the device.

    Args:
        stages: what is used together, in the order of the step.
        storage: where each parameter and its momentum are.
        offload: what is on the host.
        window: where it comes to the device.
    """

    def __init__(
        self, stages: Iterable[StageUse], storage: Sequence[Storage], offload: Offload, window: Window
    ) -> None:
        self._taken, self._storage, self.window = TAKEN[offload], storage, window
        self._stages = tuple(each for each in stages if each.stage in self._taken)
        self._names = {name for taken in self._taken.values() for name in (*taken.changed, *taken.read)}
        self._waiting: list[list[Key]] = []
        self._here: Mapping[Key, Tensor] = {}

    def begin(self, gradients: Gradients) -> None:
        """The first two transfers come."""
        self._waiting, transfers = [], []
        for each in self._stages:
            taken = self._taken[each.stage]
            changed, read = (self._rows(names, each.rows, gradients) for names in (taken.changed, taken.read))
            self._waiting.append([*changed, *read])
            transfers.append(Transfer(list(changed.values()), list(read.values())))
        self.window.begin(transfers)

    def _rows(self, names: Iterable[Name], rows: Iterable[Part], gradients: Gradients) -> dict[Key, Tensor]:
        """The rows of these tensors that this step uses."""
        return {
            (name, part.parameter, part.start): used
            for name in names
            for part in rows
            if (used := self._used(name, part, gradients)) is not None
        }

    def _used(self, name: Name, part: Part, gradients: Gradients) -> Tensor | None:
        """A part of one of these tensors: of a parameter left alone nothing; one without a gradient is decayed."""
        stored, grad = self._storage[part.parameter], gradients.stored[part.parameter]
        if name == "param":
            return None if part.parameter in gradients.left else part.of(stored.param)
        if grad is None:
            return None
        return part.of(grad) if name == "grad" else part.of_average(stored)

    @contextmanager
    def there(self, stage: Stage) -> Iterator[None]:
        """Meanwhile the next transfer is on the device; then what a stage changes goes back."""
        if stage not in self._taken:
            yield
            return
        self._here = dict(zip(self._waiting.pop(0), self.window.take(), strict=True))
        yield
        self._here = {}
        self.window.give_back()

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, in what is on the device now."""
        return [self._brought("average", part) for part in advance.parts]

    def grads(self, advance: Advance, gradients: Gradients) -> Tensors:
        """Their gradients, there or where they always are."""
        if "grad" not in self._names:
            return super().grads(advance, gradients)
        return [self._brought("grad", part) for part in advance.parts]

    def params(self, apply: Apply) -> Tensors:
        """The parts of the parameters, there or where they always are."""
        if "param" not in self._names:
            return super().params(apply)
        return [self._brought("param", part) for part in apply.parts]

    def _brought(self, name: Name, part: Part) -> Tensor:
        rows = self._here[name, part.parameter, part.start]
        return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows

    def end(self) -> None:
        """What was changed last goes back."""
        self.window.end()
        # Parameters of the host are read there without another word, by a checkpoint for one.
        if "param" in self._names:
            self.window.synchronize()

    def synchronize(self) -> None:
        """Wait for what goes back."""
        self.window.synchronize()


def stage_uses(program: Program, at_home: Sequence[Rows], in_buckets: Sequence[Rows]) -> Iterator[StageUse]:
    """What is used together, in the order of the step: by each batch at home, and by each bucket."""
    for act, number in program.turns:
        if act is Act.HOME:
            for rows in at_home:
                yield from (StageUse("advance", rows.advanced), StageUse("apply", rows.applied))
        elif act is Act.GATHER:
            yield from (StageUse("advance", in_buckets[bucket].advanced) for bucket in program.rounds[number])
        elif act is not Act.ORTHOGONALIZE:
            yield from (StageUse("apply", in_buckets[bucket].applied) for bucket in program.rounds[number])


class Rows(NamedTuple):
    """The rows whose momentum is advanced together here, and those that are updated in the end."""

    advanced: tuple[Part, ...]
    applied: tuple[Part, ...]


def rows_of(calls: Iterable[Advance | Apply]) -> tuple[Part, ...]:
    """The rows that some calls use: rectangles beside each other are of the same rows."""
    # Whole rows, for they are contiguous: a copy of anything else from the host would wait for it.
    parts = [part for call in calls for part in call.parts]
    return tuple({(part.parameter, part.start): part.rows for part in parts}.values())
