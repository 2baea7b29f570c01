"""Several algorithms in a Muon: composed (`["normuon", "muonh"]` is NorMuonH), or by parameter group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from ..engine.layout.work import Work
from ..engine.state.states import StateSpec
from ..engine.step.algorithm import Algorithm, Group, PlanContext, Tensors
from ..engine.step.foreach import MomentumCall, UpdateCall
from ..engine.step.muon import MuonAlgorithm
from ..engine.step.views import Batch
from ..options import MuonOptions, OptionError


class Several(MuonAlgorithm):
    """Algorithms that share the buckets of a Muon. Calls go to the algorithm of their parameters."""

    def __init__(self, options: MuonOptions, algorithms: Sequence[Algorithm]) -> None:
        super().__init__(options)
        self.parts = algorithms
        self.temporary_bytes = max(a.temporary_bytes for a in algorithms)
        self.sums_norms, self.whole, self.counts_steps = (
            any(getattr(a, name) for a in algorithms) for name in ("sums_norms", "whole", "counts_steps")
        )
        self.wire_dtype = next((a.wire_dtype for a in algorithms if a.wire_dtype is not None), None)

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        self.for_parameter(call.parts[0].parameter).gathering.before_gather(call, momentum, grads)

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        self.for_parameter(call.parts[0].parameter).returning.after_return(call, params)


class ByParameter(Several):
    """The algorithm of each parameter. A call or a batch has parameters of one algorithm.

    `algorithms`: by parameter of the plan.
    """

    def for_parameter(self, number: int) -> Algorithm:
        return self.parts[number]

    def update(self, batch: Batch, norms: Tensor) -> None:
        self.parts[batch.parameters[0]].update(batch, norms)


class Composed(Several):
    """Every `prepare` and `rescale`, in order, and the other steps of a single algorithm. A constant norm comes last.

    Raises OptionError for two algorithms that replace the same step or have a state of the same name.
    """

    def __init__(self, options: MuonOptions, algorithms: Sequence[Algorithm]) -> None:
        super().__init__(options, sorted(algorithms, key=lambda algorithm: algorithm.sums_norms))
        self.gathering = self._only("the momentum", "before_gather", "decay")
        self._instead = self._only("the orthogonalization", "orthogonalize")
        self.returning = self._only("the update of the weights", "after_return", "add", "factor", "rates")
        self._rescaling = [a for a in self.parts if type(a).rescale is not Algorithm.rescale]
        names = [spec.name for spec in self.states(1, 1, transposed=False)]
        if len(set(names)) < len(names):
            problem = f"= {[*options.algorithms]}: two of these keep a state of the same name; take one of them"
            raise OptionError("algorithm", problem)
        self.momentum = self.gathering.momentum

    def _only(self, step: str, *methods: str) -> Algorithm:
        """The algorithm that replaces a method of Muon, or else the first algorithm. Only one may replace a step."""
        own = [a for a in self.parts if any(getattr(type(a), n) is not getattr(MuonAlgorithm, n) for n in methods)]
        if len(own) > 1:
            problem = f"= {[*self.options.algorithms]}: two of these change {step}; take one of them"
            raise OptionError("algorithm", problem)
        return own[0] if own else self.parts[0]

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return tuple(spec for a in self.parts for spec in a.states(rows, cols, transposed=transposed))

    def work(self, rows: int, cols: int, work: Work) -> Work:
        for algorithm in self.parts:
            work = algorithm.work(rows, cols, work)
        return work

    def kind(self, group: Group) -> Hashable:
        return tuple(algorithm.kind(group) for algorithm in self.parts)

    def check_group(self, group: Group) -> None:
        for algorithm in self.parts:
            algorithm.check_group(group)

    def check(self, context: PlanContext) -> None:
        for algorithm in self.parts:
            algorithm.check(context)

    def update(self, batch: Batch, norms: Tensor) -> None:
        for algorithm in self.parts:
            norms = algorithm.prepare(batch, norms)
        self._instead.orthogonalize(batch, norms)
        for part in batch.parts:
            for algorithm in self._rescaling:
                specs = algorithm.states(*part.whole.shape[1:], transposed=part.transposed)
                own = replace(part, states={spec.name: part.states[spec.name] for spec in specs})
                states = own.stacked()
                algorithm.rescale(part.whole, states, part.group, transposed=part.transposed)
                own.store(states)
