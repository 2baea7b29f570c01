"""Momentum, gradients and weights on the host, which a step brings to the device bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..comm.faults import Fault
from ..options import Offload
from ..plan.terms.schedule import Act
from ..state.host import Transfer, Window
from ..step.feature import Feature
from ..step.foreach import Advance, Apply, Rectangle
from ..step.gradients import Step
from ..step.stages import OnDevice, RankStages, Stages
from ..step.update import Tensors
from ..tensors.storage import Storage

Stage = Literal["advance", "apply"]
Name = Literal["param", "average", "grad"]
"""A tensor of a parameter."""
Key = tuple[Name, int, int]
"""Which tensor, of which parameter, from which row on."""


@dataclass(frozen=True)
class HostTensors:
    """The tensors that a stage brings from the host: changed ones, which go back, and ones that it only reads."""

    changed: tuple[Name, ...]
    read: tuple[Name, ...] = ()


HOST_TENSORS: Mapping[Offload, Mapping[Stage, HostTensors]] = {
    "state": {"advance": HostTensors(("average",))},
    "parameters": {"advance": HostTensors(("average",), ("grad",)), "apply": HostTensors(("param",))},
}


@dataclass(frozen=True)
class StageUse:
    """A stage of one bucket, and the rows that it uses."""

    stage: Stage
    rows: tuple[Rectangle, ...]


class OnHost(OnDevice):
    """The tensors of a call while some are on the host: the device holds two transfers at a time.

    Args:
        stages: rows that are used together, in the order of the step.
        storage: storage of each parameter and of its momentum.
        offload: kind of tensors on the host.
        window: device memory that the transfers pass through.
    """

    def __init__(
        self, stages: Iterable[StageUse], storage: Sequence[Storage], offload: Offload, window: Window
    ) -> None:
        self._taken, self._storage, self.window = HOST_TENSORS[offload], storage, window
        self._stages = tuple(each for each in stages if each.stage in self._taken)
        self._names = {name for taken in self._taken.values() for name in (*taken.changed, *taken.read)}
        self._waiting: list[list[Key]] = []
        self._here: Mapping[Key, Tensor] = {}

    def begin(self, step: Step) -> None:
        """Start a step: bring the first two transfers."""
        self._waiting, transfers = [], []
        for each in self._stages:
            taken = self._taken[each.stage]
            changed, read = (self._rows(names, each.rows, step) for names in (taken.changed, taken.read))
            self._waiting.append([*changed, *read])
            transfers.append(Transfer(list(changed.values()), list(read.values())))
        self.window.begin(transfers)

    def _rows(self, names: Iterable[Name], rows: Iterable[Rectangle], step: Step) -> dict[Key, Tensor]:
        """The rows of these tensors that this step uses."""
        return {
            (name, part.parameter, part.start): used
            for name in names
            for part in rows
            if (used := self._used(name, part, step)) is not None
        }

    def _used(self, name: Name, part: Rectangle, step: Step) -> Tensor | None:
        """A part of a tensor; None for an excluded parameter. A parameter without a gradient is still decayed."""
        stored, grad = self._storage[part.parameter], step.grads[part.parameter]
        if name == "param":
            return None if part.parameter in step.excluded else part.of(stored.param)
        if grad is None:
            return None
        return part.of(grad) if name == "grad" else part.of_average(stored)

    @contextmanager
    def there(self, stage: Stage) -> Iterator[None]:
        """Hold the next transfer on the device, then send back the tensors that the stage has changed."""
        if stage not in self._taken:
            yield
            return
        self._here = dict(zip(self._waiting.pop(0), self.window.take(), strict=True))
        yield
        self._here = {}
        self.window.give_back()

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, in the current transfer."""
        return [self._brought("average", part) for part in advance.parts]

    def grads(self, advance: Advance, step: Step) -> Tensors:
        """The gradients of the parts, in the current transfer if gradients are on the host."""
        if "grad" not in self._names:
            return super().grads(advance, step)
        return [self._brought("grad", part) for part in advance.parts]

    def params(self, apply: Apply) -> Tensors:
        """The parts of the parameters, in the current transfer if parameters are on the host."""
        if "param" not in self._names:
            return super().params(apply)
        return [self._brought("param", part) for part in apply.parts]

    def _brought(self, name: Name, part: Rectangle) -> Tensor:
        rows = self._here[name, part.parameter, part.start]
        return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows

    def end(self) -> None:
        """Send back the last transfer."""
        self.window.end()
        # A checkpoint, for example, reads parameters on the host without any further call.
        if "param" in self._names:
            self.window.synchronize()

    def synchronize(self) -> None:
        """Wait until the last transfer is on the host."""
        self.window.synchronize()


class HostOffload(Feature):
    """Brings what a stage uses to the device before the stage, and sends back what the stage has changed.

    Args:
        offload: kind of tensors on the host.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._source: OnHost | None = None

    @property
    def source(self) -> OnHost:
        """The tensors on the host."""
        assert self._source is not None, "stages are wrapped before the first step"
        return self._source

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """Bring the tensors of `advance` and `apply`, and give them to the calls."""
        self._source = source = OnHost(stage_uses(rank), rank.storage, self._offload, Window(rank.device))
        rank.source = source

        def advance(bucket: int, step: Step) -> None:
            with source.there("advance"):
                stages.advance(bucket, step)

        def apply(bucket: int, step: Step) -> None:
            with source.there("apply"):
                stages.apply(bucket, step)

        return stages._replace(advance=advance, apply=apply)

    def before(self, step: Step) -> None:
        """Bring the first transfers."""
        self.source.begin(step)

    def after(self) -> None:
        """Send back the last transfer."""
        self.source.end()

    def told(self, faults: Sequence[Fault]) -> None:
        """Have the momentum on the host before it is healed."""
        self.source.synchronize()

    def flush(self, *, discard: bool = False) -> None:
        """With `discard`, wait until every transfer to the host is complete."""
        if discard:
            self.source.synchronize()


def stage_uses(rank: RankStages) -> Iterator[StageUse]:
    """The rows that each stage uses, in the order of the step."""
    for act, bucket in rank.program.acts:
        if act is Act.GATHER:
            yield StageUse("advance", rows_of(rank.runs[bucket].advances))
        elif act is Act.APPLY:
            yield StageUse("apply", rows_of(rank.runs[bucket].applies))


def rows_of(calls: Iterable[Advance | Apply]) -> tuple[Rectangle, ...]:
    """The row ranges that some calls use. Rectangles side by side share one range."""
    # Whole rows are contiguous. A copy of a narrower rectangle from the host would block.
    parts = [part for call in calls for part in call.parts]
    return tuple({(part.parameter, part.start): part.rows for part in parts}.values())
