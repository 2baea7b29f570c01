"""The interface of optional features, and the parts of a step that a feature may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...options import MuonOptions
from ..exchange.exchange import StepMemory
from ..state.states import MatrixStates
from .algorithm import Algorithm, PlanContext
from .foreach import StepContext
from .step import Hook, HostTensors, LateUpdates, MuonStep, Passes, Runner, UpdateMask
from .views import BucketViews


class Feature:
    """An optional behaviour of a step. The list has the features that are on; the engine imports no other file.

    The engine calls each method of all features, in the order of the list, on every rank alike.
    """

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for options or parameters that the feature cannot use."""

    def overlap(self) -> LateUpdates | None:
        """The object that ends the late buckets of a step, once for an optimizer. None: the step ends all buckets."""
        return None

    def decorate(self, parts: BuiltStep) -> None:
        """Before the views are made: decorate the algorithm, add states and hooks."""

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        """After the views are made: replace views and mask, add hooks. `before`: for earlier storage of the plan."""

    def runner(self, parts: BuiltStep) -> Runner | None:
        """After the step is made: the object that runs the step. None: the step runs itself."""
        return None


FeaturesOf = Callable[[MuonOptions, Algorithm], Sequence[Feature]]
"""The features that are on."""


@dataclass
class BuiltStep:
    """A rank's step, made with the features that are on.

    `workspace`, `offload`, `passes`: memory of assembled matrices, the tensors on the host, and kernels, if any.
    """

    rank: StepContext
    algorithm: Algorithm
    states: MatrixStates
    mask: UpdateMask = field(default_factory=UpdateMask)
    hooks: list[Hook] = field(default_factory=list)
    offload: HostTensors | None = None
    passes: Passes | None = None
    views: tuple[BucketViews, ...] = field(init=False)
    workspace: StepMemory = field(init=False)
    step: MuonStep = field(init=False)
    runner: Runner = field(init=False)
