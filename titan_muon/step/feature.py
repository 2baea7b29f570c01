"""The interface of features: options that wrap the stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..comm.faults import Fault
from .gradients import Step
from .stages import RankStages, Stages


class Feature:
    """An option that changes how stages run. The default of every method does nothing.

    The engine calls, in this order: `wrap` when it is built; then in each step `ready` and `faults` before anything
    changes, `before` and `after` around the stages. `told`, `flush` and `backward` run between steps.

    Attributes:
        holds_buffers: whether the buffers are in use after the step.
    """

    holds_buffers = False

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """The stages with this feature. Called again when parameters or momentum have moved."""
        return stages

    def ready(self) -> None:
        """Prepare a step. Raises ValueError, on all ranks alike, if no step can be taken now."""

    def faults(self, found: Sequence[Fault]) -> Sequence[Fault]:
        """The faults of a step by parameter, with those that the feature finds on this rank."""
        return found

    def told(self, faults: Sequence[Fault]) -> None:
        """Learn the faults, at least one, that all ranks have been told of."""

    def before(self, step: Step) -> None:
        """Start a step. The buffers have memory."""

    def after(self) -> None:
        """End a step."""

    def flush(self, *, discard: bool = False) -> None:
        """Finish what a step has left, before weights or momentum are read or replaced.

        With `discard`, work for a step that will not come is dropped; all ranks call it together.
        """

    def backward(self) -> AbstractContextManager[None]:
        """The context of the last backward before a step."""
        return nullcontext()
