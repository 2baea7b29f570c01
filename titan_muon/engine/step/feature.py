"""The interface of optional features of a step, and the loops over the features that are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...options import MuonOptions, OptionError
from ..layout.types import Plan
from ..state.states import MatrixStates
from .algorithm import Algorithm, PlanContext
from .context import StepContext
from .step import Hook, HostTensors, LateUpdates, MuonStep, Passes, Runner, UpdateMask
from .views import build_views


class Feature:
    """An optional behaviour of a step. A feature that is off is not in the list, and its file is not imported.

    The engine calls each method of all features, in the order of the list, on every rank alike.
    """

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for options or parameters that the feature cannot use."""

    def overlap(self) -> LateUpdates | None:
        """What ends the late buckets of a step, once for an optimizer. None: the step."""
        return None

    def decorate(self, parts: BuiltStep) -> None:
        """Before the views are made: decorate the algorithm, add states and hooks."""

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        """After the views are made: replace views and mask, add hooks. `before`: for earlier storage of the plan."""

    def runner(self, parts: BuiltStep) -> Runner | None:
        """After the step is made: what runs it. None: the step itself."""
        return None


FeaturesOf = Callable[[MuonOptions, Algorithm], Sequence[Feature]]
"""The features that are on."""


class BuiltStep:
    """A rank's step, made with the features that are on.

    `workspace`, `offload`, `passes`: memory of assembled matrices, the tensors on the host, and kernels, if any.
    """

    def __init__(
        self,
        rank: StepContext,
        algorithm: Algorithm,
        states: MatrixStates,
        overlap: LateUpdates | None,
        features: Sequence[Feature],
        before: BuiltStep | None,
    ) -> None:
        if before is not None:
            before.runner.release()
        self.rank, self.algorithm, self.states = rank, algorithm, states
        self.hooks, self.mask = list[Hook](), UpdateMask(rank.report)
        self.offload: HostTensors | None = None
        self.passes: Passes | None = None
        for feature in features:
            feature.decorate(self)
        self.views, self.workspace, flags = build_views(rank, algorithm.whole, self.states)
        for feature in features:
            feature.build(self, before)
        rank.report.watch(flags)
        seams = self.algorithm, self.mask, overlap, self.offload, self.hooks, self.passes
        self.step = MuonStep(rank.program, self.views, rank.exchange, rank.report, *seams)
        runners = (feature.runner(self) for feature in features)
        self.runner: Runner = next((runner for runner in runners if runner is not None), self.step)


def check_parts(context: PlanContext, algorithm: Algorithm, features_of: FeaturesOf) -> None:
    """Raise OptionError if options, features or an algorithm cannot train the parameters. Equal on all ranks."""
    parts: dict[Algorithm, list[int]] = {}
    for number in range(len(context.named)):
        parts.setdefault(algorithm.for_parameter(number), []).append(number)
    for part, numbers in parts.items():
        own = context.part(part.options.algorithm, numbers)
        features = (feature.check for feature in features_of(own.options, part))
        for check in (*features, part.check):
            check(own)


def check_travels(context: PlanContext, plan: Plan) -> None:
    """Raise OptionError for options of the exchange if owned parameters leave nothing to exchange."""
    owned = context.owned()
    for name in ("overlap", "exchange") if owned and not plan.buckets else ():
        value, default = getattr(context.options, name), getattr(MuonOptions(), name)
        if value != default:
            raise OptionError(
                name,
                f"= {value!r} has no effect: the owner of an owned parameter stores the whole matrix "
                f"({', '.join(owned[:5])}), and no other matrix travels; set {default!r}",
            )
