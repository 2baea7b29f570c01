"""`idle="hold"`: one pass over gradients, and one maximum over ranks."""

# [Note: matrices without an update]
# - Each matrix has a code: no holder, a zero gradient, or a gradient, also a missing one. The maximum over the ranks
#   that share matrices makes all ranks agree on the device, without a wait of the host.
# - Idle: a zero gradient. Only the update is held, because Newton-Schulz normalizes the momentum: an expert
#   without tokens would move at full speed, for hundreds of steps. The maximum hides behind the first gather.
# - The whole gradient of a matrix counts. Shards of one name on several meshes count together.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.faults.faults import norm_dtype
from ..engine.layout.intervals import spans
from ..engine.layout.types import Plan
from ..engine.orthogonalize import NO_UPDATE
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import Rectangle, StepContext, rectangle_of
from ..engine.step.gradients import StepGradients
from ..engine.step.step import UpdateMask
from ..engine.step.views import Batch, BucketViews
from ..engine.tensors.dtensor import is_host, may_be_true
from ..engine.tensors.names import listed, warn

ZERO, GRADIENT = 1, 2
"""Codes of a matrix. A matrix without a holder among the ranks has code 0."""
IDLE_STEPS = 20
"""Idle steps in a row before the warning."""


class IdleSteps:
    """Counts idle steps of each matrix, and warns."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        count = len(plan.matrices)
        self.on_host = torch.zeros(count, dtype=torch.bool, device="cpu", pin_memory=not is_host(device))
        self._steps = self._named = torch.zeros(count, dtype=torch.int32, device="cpu")

    def warn(self) -> None:
        """Count the last step, whose report has been read, so that the copy to the host has arrived."""
        self._steps = torch.where(self.on_host, self._steps + 1, 0)
        new = (self._steps >= IDLE_STEPS) & (self._named == 0)
        if not new.any():
            return
        self._named = self._named | new
        names = [self._name(number) for number in new.nonzero().flatten().tolist()]
        warn(
            f"{listed(names)}: the gradient was zero in each of {IDLE_STEPS} steps, so the matrix "
            "gets no update (expert.idle = 'hold'); look for an expert without tokens, or a branch that the loss does "
            "not use"
        )

    def _name(self, number: int) -> str:
        matrix = self._plan.matrices[number]
        parameter = self._plan.parameters[matrix.parameter]
        matrices = parameter.stack.matrices
        label = f" {matrices[matrix.index].label}" if len(matrices) > 1 else ""
        return f"{parameter.fqn}{label}"


class GradientMask(UpdateMask):
    """See [Note: matrices without an update]."""

    captured = False

    def __init__(self, rank: StepContext, views: Sequence[BucketViews], idle: IdleSteps) -> None:
        self._rank, self.idle = rank, idle
        matrices = rank.plan.matrices
        self._parts, self._numbers = list[Rectangle](), list[int]()
        for parcel in (parcel for bucket in rank.program.buckets for parcel in bucket.stored):
            parameter = matrices[parcel.matrix].parameter
            for span in spans(parcel.piece):
                self._parts.append(rectangle_of(parameter, span, rank.storage[parameter].param))
                self._numbers.append(parcel.matrix)
        self._all_numbers = rank.numbers(self._numbers)
        self._codes = torch.zeros(len(matrices), dtype=torch.int32, device=rank.device)
        self._own_codes = self._codes
        self._held = torch.zeros(len(matrices), dtype=torch.bool, device=rank.device)
        # The flags of a batch are a view of one tensor in the order of the batches.
        in_order = [matrix for bucket in views for _, batch, _ in bucket.batches for matrix in batch.matrices]
        self._in_order = rank.numbers(in_order)
        self._flags = torch.zeros(len(in_order), dtype=torch.bool, device=rank.device)
        # Each rank trains its own values of these matrices.
        separate = [parameter.separate for parameter in rank.plan.parameters]
        local = zip(matrices, rank.plan.local, strict=True)
        own = torch.tensor([separate[matrix.parameter] and bool(ranks) for matrix, ranks in local], device="cpu")
        self._own = rank.on_device(own) if own.any() else None
        self._work: dist.Work | None = None
        self._agreed = True

    def begin(self, gradients: StepGradients) -> None:
        self.idle.warn()
        self._codes.zero_()
        self._add_gradients(gradients)
        self._add_missing(gradients)
        self._own_codes = self._codes if self._own is None else self._codes.clone()
        # Without a travelling matrix no other rank has a part of these.
        travels = bool(self._rank.plan.buckets)
        self._work = self._rank.agreement.start_max_over_peers(self._codes) if travels else None
        self._agreed = False

    def _add_gradients(self, gradients: StepGradients) -> None:
        present = [place for place, part in enumerate(self._parts) if gradients.grads[part.parameter] is not None]
        if not present:
            return
        grads = [self._parts[place].of(gradients.grads[self._parts[place].parameter]) for place in present]
        # Offloaded gradients have their norms on the host.
        norms = torch.stack(torch._foreach_norm(grads, math.inf, dtype=norm_dtype(grads)))
        norms = norms.to(self._codes.device, non_blocking=True)
        numbers = self._all_numbers
        if len(present) < len(self._parts):
            numbers = self._rank.numbers([self._numbers[place] for place in present])
        self._codes.scatter_reduce_(0, numbers, norms.ne(0).int().add_(ZERO), "amax")

    def _add_missing(self, gradients: StepGradients) -> None:
        params = enumerate(self._rank.params)
        missing = {i for i, p in params if p.on_mesh and gradients.grads[i] is None} - gradients.excluded
        if missing:
            matrices = enumerate(self._rank.plan.matrices)
            lacking = [number for number, matrix in matrices if matrix.parameter in missing]
            self._codes.index_fill_(0, self._rank.numbers(lacking), GRADIENT)

    def agree(self) -> None:
        if self._agreed:
            return
        self._agreed = True
        if self._work is not None:
            self._work.wait()
        zero = self._codes if self._own is None else torch.where(self._own, self._own_codes, self._codes)
        torch.eq(zero, ZERO, out=self._held)
        torch.index_select(self._held, 0, self._in_order, out=self._flags)

    def zero_(self, batch: Batch, gradients: StepGradients) -> Tensor:
        self.agree()
        flags = self._flags[batch.place : batch.place + len(batch.matrices)]
        if may_be_true(flags):
            batch.whole.masked_fill_(flags[:, None, None], 0)
        return super().zero_(batch, gradients).masked_fill_(flags, NO_UPDATE)

    def end(self) -> None:
        self.agree()
        self.idle.on_host.copy_(self._held, non_blocking=True)


class IdleFeature(Feature):
    """Matrices with a zero gradient are held."""

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        counted = next((hook.idle for hook in before.hooks if isinstance(hook, GradientMask)), None) if before else None
        parts.mask = mask = GradientMask(
            parts.rank, parts.views, counted or IdleSteps(parts.rank.plan, parts.rank.device)
        )
        parts.hooks.append(mask)
