"""The interface of features."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..comm.faults import Fault
from .gradients import Step
from .stages import RankStages, Stages


class Feature:
    """An option that changes how stages run. By default every method does nothing.

    Each step calls `ready` and `faults` before any tensor changes, then `before` and `after` around the stages. `told`,
    `flush` and `backward` run between steps. `holds_buffers`: whether the buffers are in use after the step.
    `allowed`: faults that warn instead of raising.
    """

    holds_buffers = False
    allowed: Sequence[Fault] = ()

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """The stages with this feature. Called again after parameters or momentum have moved."""
        return stages

    def ready(self, rank: RankStages) -> None:
        """Prepare a step. Raises ValueError on all ranks if no step is possible."""

    def faults(self, faults: Sequence[Fault]) -> Sequence[Fault]:
        """The faults by parameter, with this feature's faults."""
        return faults

    def told(self, faults: Sequence[Fault]) -> None:
        """React to faults, at least one, equal on all ranks."""

    def before(self, step: Step) -> None:
        """Start a step. The buffers are allocated."""

    def after(self) -> None:
        """End a step."""

    def flush(self, *, discard: bool = False) -> None:
        """Finish the work of a step; `discard` also drops work for the next step. Collective."""

    def backward(self) -> AbstractContextManager[None]:
        """Context of the last backward before a step."""
        return nullcontext()
