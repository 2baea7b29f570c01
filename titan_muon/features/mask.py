"""`on_bad_gradient="skip"` and `idle="hold"`: one pass over gradients, and one maximum over ranks."""

# [Note: matrices without an update]
# - Each matrix has a code: no holder, a zero gradient, a gradient, or a missing or non-finite gradient. The maximum
#   over the ranks that share matrices makes all ranks agree on the device, without a wait of the host.
# - Skipped: a missing or non-finite gradient with `skip`. Momentum and weights of the matrix stay too, so all holders
#   must know before the momentum changes.
# - Idle: a zero gradient with `hold`. Only the update is held, because Newton-Schulz normalizes the momentum: an expert
#   without tokens would move at full speed, for hundreds of steps. The maximum hides behind the first gather.
# - The whole gradient of a matrix counts. Shards of one name on several meshes count together.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.faults import Fault, allowed_faults, norm_dtype
from ..orthogonalize import NO_UPDATE
from ..plan.terms.layout import spans
from ..plan.terms.types import Plan
from ..step.foreach import Rectangle, rectangle_of
from ..step.gradients import StepGradients
from ..step.rank import Rank
from ..step.step import UpdateMask
from ..step.views import Batch, BucketViews
from ..tensors.device import is_host, may_be_true
from ..tensors.names import listed
from ..tensors.warning import warn

ZERO, GRADIENT, SKIPPED = 1, 2, 3
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
    """See [Note: matrices without an update].

    `skipped`: (matrices,) bool on the device.
    """

    def __init__(self, rank: Rank, views: Sequence[BucketViews], idle: IdleSteps) -> None:
        super().__init__(rank.report)
        self._rank, self._idle = rank, idle
        # Faults of matrices that are skipped instead of reported as an error.
        self._allowed = allowed_faults(missing=rank.options.skips_missing, nonfinite=rank.options.skips_nonfinite)
        self._holds = rank.options.idle == "hold"
        matrices = rank.plan.matrices
        self._parts, self._numbers = list[Rectangle](), list[int]()
        for parcel in (parcel for bucket in rank.program.buckets for parcel in bucket.stored):
            parameter = matrices[parcel.matrix].parameter
            for span in spans(parcel.piece):
                self._parts.append(rectangle_of(parameter, span, rank.storage[parameter].param))
                self._numbers.append(parcel.matrix)
        self._all_numbers = rank.numbers(self._numbers)
        self._all_parameters = rank.numbers([part.parameter for part in self._parts])
        self._codes = torch.zeros(len(matrices), dtype=torch.int32, device=rank.device)
        self._own_codes = self._codes
        self.skipped = torch.zeros(len(matrices), dtype=torch.bool, device=rank.device)
        self._held = torch.zeros_like(self.skipped)
        # The flags of a batch are a view of one tensor in the order of the batches.
        in_order = [matrix for of in views for _, batch, _ in of.batches for matrix in batch.matrices]
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
        if self._holds:
            self._idle.warn()
        self._codes.zero_()
        self._add_gradients(gradients)
        self._add_missing(gradients)
        self._own_codes = self._codes if self._own is None else self._codes.clone()
        # Without a travelling matrix no other rank has a part of these, except for skips of replicas.
        agrees = bool(self._allowed) or bool(self._rank.plan.buckets)
        self._work = self._rank.agreement.start_max_over_peers(self._codes) if agrees else None
        self._agreed = False
        if self._allowed:
            self._agree()

    def _add_gradients(self, gradients: StepGradients) -> None:
        present = [place for place, part in enumerate(self._parts) if gradients.grads[part.parameter] is not None]
        if not present:
            return
        grads = [self._parts[place].of(gradients.grads[self._parts[place].parameter]) for place in present]
        # Offloaded gradients have their norms on the host.
        norms = torch.stack(torch._foreach_norm(grads, math.inf, dtype=norm_dtype(grads)))
        norms = norms.to(self._codes.device, non_blocking=True)
        numbers, parameters = self._all_numbers, self._all_parameters
        if len(present) < len(self._parts):
            numbers = self._rank.numbers([self._numbers[place] for place in present])
            parameters = self._rank.numbers([self._parts[place].parameter for place in present])
        codes = norms.ne(0).int().add_(ZERO)
        if Fault.NOT_FINITE in self._allowed:
            # Newton-Schulz cannot normalize by a norm that overflows.
            frobenius = torch.stack(torch._foreach_norm(grads, 2, dtype=norm_dtype(grads))).float()
            broken = frobenius.to(self._codes.device).isfinite().logical_not_()
            codes = torch.where(broken, SKIPPED, codes)
            self.report.add_where(parameters, broken, Fault.NOT_FINITE)
        self._codes.scatter_reduce_(0, numbers, codes, "amax")

    def _add_missing(self, gradients: StepGradients) -> None:
        params = enumerate(self._rank.params)
        missing = {i for i, p in params if p.on_mesh and gradients.grads[i] is None} - gradients.excluded
        if missing:
            # Without `skip` a missing gradient is another fault.
            code = SKIPPED if Fault.NO_GRADIENT in self._allowed else GRADIENT
            matrices = enumerate(self._rank.plan.matrices)
            lacking = [number for number, matrix in matrices if matrix.parameter in missing]
            self._codes.index_fill_(0, self._rank.numbers(lacking), code)

    def _agree(self) -> None:
        if self._agreed:
            return
        self._agreed = True
        if self._work is not None:
            self._work.wait()
        codes = self._codes
        torch.eq(codes, SKIPPED, out=self.skipped)
        if self._holds:
            zero = codes if self._own is None else torch.where(self._own, self._own_codes, codes)
            torch.logical_or(self.skipped, zero == ZERO, out=self._held)
        else:
            self._held.copy_(self.skipped)
        torch.index_select(self._held, 0, self._in_order, out=self._flags)

    def zero_(self, batch: Batch, gradients: StepGradients) -> Tensor:
        self._agree()
        flags = self._flags[batch.place : batch.place + len(batch.matrices)]
        if may_be_true(flags):
            batch.whole.masked_fill_(flags[:, None, None], 0)
        return super().zero_(batch, gradients).masked_fill_(flags, NO_UPDATE)

    def end(self) -> None:
        self._agree()
        if self._holds:
            self._idle.on_host.copy_(self._held & ~self.skipped, non_blocking=True)
