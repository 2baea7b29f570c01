"""`offload`: a step streams momentum, gradients and weights from the host to the device by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from ..comm.faults import Fault
from ..options import Offload
from ..plan.terms.schedule import Act
from ..state.host import Transfer, Window
from ..step.feature import Feature
from ..step.foreach import Advance, Apply, Rectangle
from ..step.gradients import Step
from ..step.rule import Rule
from ..step.stages import RankStages, Stages
from ..step.update import Tensors
from ..tensors.storage import Storage

Stage = Literal["advance", "apply"]
Name = Literal["param", "average", "grad"]
Key = tuple[Name, int, int]
"""Kind of tensor, parameter, first row."""


Names = tuple[Name, ...]
HOST_TENSORS: Mapping[Offload, Mapping[Stage, tuple[Names, Names]]] = {
    "state": {"advance": (("average",), ())},
    "parameters": {"advance": (("average",), ("grad",)), "apply": (("param",), ())},
}
"""Changed tensors, fetched and sent back, and tensors that are only fetched."""


StageUse = tuple[Stage, tuple[Rectangle, ...]]
"""A stage of a bucket, and the rows that it uses."""


class OnHost:
    """The tensors of a call if some are on the host. `stages` are in the order of the step."""

    def __init__(
        self, stages: Iterable[StageUse], storage: Sequence[Storage], offload: Offload, window: Window
    ) -> None:
        self._kinds, self._storage, self.window = HOST_TENSORS[offload], storage, window
        self._stages = tuple(use for use in stages if use[0] in self._kinds)
        self._names = {name for changed, read in self._kinds.values() for name in (*changed, *read)}
        self._waiting: list[list[Key]] = []
        self._fetched: Mapping[Key, Tensor] = {}

    def begin(self, step: Step) -> None:
        self._waiting, transfers = [], []
        for stage, rows in self._stages:
            changed, read = (self._rows(names, rows, step) for names in self._kinds[stage])
            self._waiting.append([*changed, *read])
            transfers.append(Transfer(list(changed.values()), list(read.values())))
        self.window.begin(transfers)

    def _rows(self, names: Iterable[Name], rows: Iterable[Rectangle], step: Step) -> dict[Key, Tensor]:
        return {
            (name, part.parameter, part.start): tensor
            for name in names
            for part in rows
            if (tensor := self._tensor(name, part, step)) is not None
        }

    def _tensor(self, name: Name, part: Rectangle, step: Step) -> Tensor | None:
        """None if unused. The step decays a parameter without a gradient unless excluded."""
        stored, grad = self._storage[part.parameter], step.grads[part.parameter]
        if name == "param":
            return None if part.parameter in step.excluded else part.of(stored.param)
        if grad is None:
            return None
        return part.of(grad) if name == "grad" else part.of_average(stored)

    @contextmanager
    def on_device(self, stage: Stage) -> Iterator[None]:
        """Hold the next transfer on the device, then send back the changed tensors."""
        if stage not in self._kinds:
            yield
            return
        self._fetched = dict(zip(self._waiting.pop(0), self.window.take(), strict=True))
        yield
        self._fetched = {}
        self.window.give_back()

    def averages(self, advance: Advance) -> Tensors:
        return [self._view("average", part) for part in advance.parts]

    def grads(self, advance: Advance, grads: Tensors) -> Tensors:
        if "grad" not in self._names:
            return grads
        return [self._view("grad", part) for part in advance.parts]

    def params(self, apply: Apply) -> Tensors:
        if "param" not in self._names:
            return apply.params
        return [self._view("param", part) for part in apply.parts]

    def _view(self, name: Name, part: Rectangle) -> Tensor:
        rows = self._fetched[name, part.parameter, part.start]
        return rows[:, part.place[1]] if isinstance(part.place, tuple) else rows

    def end(self) -> None:
        self.window.end()
        # The user may read parameters on the host after the step.
        if "param" in self._names:
            self.window.synchronize()


class HostOffload(Feature):
    """Fetches the tensors of a stage before it, and sends changed tensors back."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        self.source = source = OnHost(stage_uses(rank), rank.storage, self._offload, Window(rank.device))
        calls = rank.calls

        def advance_call(call: Advance, averages: Tensors, grads: Tensors, rule: Rule) -> None:
            calls.advance(call, source.averages(call), source.grads(call, grads), rule)

        def update_call(call: Apply, params: Tensors, rule: Rule) -> None:
            calls.update(call, source.params(call), rule)

        rank.calls = calls._replace(advance=advance_call, update=update_call)

        def advance(bucket: int, step: Step) -> None:
            with source.on_device("advance"):
                stages.advance(bucket, step)

        def apply(bucket: int, step: Step) -> None:
            with source.on_device("apply"):
                stages.apply(bucket, step)

        return stages._replace(advance=advance, apply=apply)

    def before(self, step: Step) -> None:
        self.source.begin(step)

    def after(self) -> None:
        self.source.end()

    def told(self, faults: Sequence[Fault]) -> None:
        """Wait for the transfers to the host, because the engine may repair the momentum there next."""
        self.source.window.synchronize()

    def flush(self, *, discard: bool = False) -> None:
        if discard:
            self.source.window.synchronize()


def stage_uses(rank: RankStages) -> Iterator[StageUse]:
    """The rows of each stage, in the order of the step."""
    for act, bucket in rank.program.acts:
        if act is Act.GATHER:
            yield "advance", rows_of(rank.runs[bucket].advances)
        elif act is Act.APPLY:
            yield "apply", rows_of(rank.runs[bucket].applies)


def rows_of(calls: Iterable[Advance | Apply]) -> tuple[Rectangle, ...]:
    """The rows of these calls. Rectangles side by side share one range."""
    # Whole rows, because a copy of non-contiguous memory from the host would block.
    parts = [part for call in calls for part in call.parts]
    return tuple({(part.parameter, part.start): part.rows for part in parts}.values())
