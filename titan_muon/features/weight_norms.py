"""Frobenius norms of sharded weights, for algorithms with constant norms (`Algorithm.sums_norms`)."""

# [Note: weight norms]
# - A step begins and ends with an all-reduce of one float32 number for each matrix that travels.
# - At the end, weights are multiplied by the ratio of the norms before and after the step. The factor of an unchanged
#   matrix is exactly 1.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.exchange.exchange import wait_all
from ..engine.faults.faults import Fault
from ..engine.layout.intervals import Geometries, spans
from ..engine.step.algorithm import WEIGHT_NORM, Algorithm, Decorated, PlanContext
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import StepContext, rectangle_of
from ..engine.step.gradients import StepGradients
from ..engine.step.views import Batch
from ..options import OptionError


class WeightNorms(Decorated):
    """A hook of the step, and a decorator that waits for the norms before the first matrix needs its state.

    `norms`: by matrix, the state `WEIGHT_NORM`, a view of the norms before the step.
    """

    captured = True

    def __init__(self, inner: Algorithm, rank: StepContext) -> None:
        super().__init__(inner)
        self._rank, plan, geometries = rank, rank.plan, Geometries(rank.plan.parameters)
        group = rank.agreement.peers
        peers = {rank.program.rank} if group is None else set(dist.get_process_group_ranks(group))
        numbers, shares, self._weights = list[int](), list[float](), list[Tensor]()
        for bucket in rank.program.buckets:
            for parcel in bucket.stored:
                matrix = plan.matrices[parcel.matrix]
                if not inner.for_parameter(matrix.parameter).sums_norms:
                    continue
                stored = rank.storage[matrix.parameter].param
                # Replicas among the peers count once together. Local matrices are not summed over ranks.
                elements = geometries[matrix.parameter].elements(matrix.index)
                held = sum(count for holder, count in elements.items() if holder in peers)
                for span in spans(parcel.piece):
                    numbers.append(parcel.matrix)
                    shares.append(1.0 if bucket.local else matrix.numel / held)
                    self._weights.append(rectangle_of(matrix.parameter, span, stored).of(stored))
        device = rank.device
        self._numbers = rank.numbers(numbers)
        self._parameters = rank.numbers([plan.matrices[number].parameter for number in numbers])
        self._shares = torch.tensor(shares, device=device)
        self._travels = torch.tensor([not ranks for ranks in plan.local], device=device)
        self._before = torch.zeros(len(plan.matrices), device=device)
        # Of the norms before the step, until a matrix needs its state.
        self._works: Sequence[dist.Work] | None = None
        of_matrices = zip(plan.matrices, self._before.split(1), strict=True)
        self.norms = {
            number: {WEIGHT_NORM: norm}
            for number, (matrix, norm) in enumerate(of_matrices)
            if inner.for_parameter(matrix.parameter).sums_norms
        }

    def begin(self, gradients: StepGradients) -> None:
        self._works = self._start(self._before)

    def update(self, batch: Batch, norms: Tensor) -> None:
        self.wait()
        super().update(batch, norms)

    def wait(self) -> None:
        """Wait for the norms before the step, once."""
        if self._works is not None:
            self._finish(self._before, self._works)
        self._works = None

    def end(self) -> None:
        self.wait()
        after = torch.empty_like(self._before)
        self._finish(after, self._start(after))
        if not self._weights:
            return
        factors = torch.where(after > 0, self._before / after, 1.0)[self._numbers]
        torch._foreach_mul_(self._weights, list(factors.unbind()))
        self._rank.report.add_where(self._parameters, self._before[self._numbers] == 0, Fault.ZERO_WEIGHTS)

    def _start(self, sums: Tensor) -> Sequence[dist.Work]:
        """Start to fill `sums` (matrices,) with the squared norms of travelling and local matrices."""
        sums.zero_()
        if self._weights:
            norms = torch.stack(torch._foreach_norm(self._weights)).float()
            sums.index_put_((self._numbers,), norms.square_().mul_(self._shares), accumulate=True)
        if self._rank.agreement.peers is None or not self._rank.plan.buckets:
            return ()
        self._local = sums.masked_fill(self._travels, 0)
        sums.masked_fill_(~self._travels, 0)
        return self._rank.exchange.collectives.all_reduce(sums, self._rank.agreement.peers)

    def _finish(self, sums: Tensor, works: Sequence[dist.Work]) -> None:
        wait_all(works)
        if works:
            sums.add_(self._local)
        sums.sqrt_()


class WeightNormsFeature(Feature):
    """Constant norms of matrices."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for updates after the step, and for weights on the host."""
        algorithm = f"algorithm = {context.options.algorithm!r}"
        if context.options.overlap == "forward":
            problem = f"= 'forward' applies updates in forward, before {algorithm} can project the weights"
            raise OptionError("overlap", f"{problem}; set 'none'")
        if context.options.offload == "parameters":
            raise OptionError("offload", f"= 'parameters': {algorithm} projects weights on the device; set 'state'")

    def decorate(self, parts: BuiltStep) -> None:
        parts.algorithm = weight_norms = WeightNorms(parts.algorithm, parts.rank)
        norms, states = weight_norms.norms.items(), parts.states
        parts.states = {**states, **{number: {**states.get(number, {}), **norm} for number, norm in norms}}
        parts.hooks.append(weight_norms)
