"""`idle="hold"`: a matrix with a zero gradient gets no update, and a warning after some steps."""

# [Note: idle matrices]
# - The momentum of an expert without tokens shrinks, but Newton-Schulz normalizes the momentum. So the expert would
#   move at full speed, for hundreds of steps.
# - The whole gradient of a matrix counts. The ranks that share matrices agree on the device, by a maximum during the
#   first gather, without a wait of the host. If no matrix travels, there is no collective.
# - Shards of one name on several meshes count together: the matrix is idle if its gradient is zero on every mesh.
# - Owners then orthogonalize zeros. Momentum and weight decay go on.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from ..comm.agreement import Agreement
from ..plan.terms.layout import spans
from ..step.feature import Feature
from ..step.foreach import Rectangle, rectangle_of
from ..step.gradients import Step
from ..step.stages import RankStages, Stages
from ..tensors.names import listed
from ..tensors.warning import warn

IDLE_STEPS = 20
"""Idle steps in a row before the warning."""
ZERO, ACTIVE = 1, 2
"""States of a gradient. A matrix without a holder among the ranks has state 0."""


class Idle(Feature):
    """See [Note: idle matrices]."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._steps = torch.zeros(0, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        self._rank, matrices = rank, rank.plan.matrices
        # Slices of a matrix share the place of the first slice.
        places = [n if matrix.slice is None else n - matrix.slice.place for n, matrix in enumerate(matrices)]
        self._place_gradients(places)
        self._states = torch.zeros(len(matrices), dtype=torch.int32, device=rank.device)
        self._idle = torch.zeros(len(matrices), dtype=torch.bool, device=rank.device)
        if len(self._steps) != len(matrices):
            self._on_host = torch.zeros_like(self._idle, device="cpu", pin_memory=rank.device.type != "cpu")
            self._steps = self._named = torch.zeros_like(self._on_host, dtype=torch.int32)
        # Each rank trains its own values of these matrices.
        separate = [parameter.separate for parameter in rank.plan.parameters]
        local = zip(matrices, rank.plan.local, strict=True)
        own = torch.tensor([separate[matrix.parameter] and bool(ranks) for matrix, ranks in local], device="cpu")
        self._own = rank.on_device(own) if own.any() else None
        rank.mask(self._idle, places)

        def orthogonalize(bucket: int, step: Step) -> None:
            self._agree()
            stages.orthogonalize(bucket, step)

        return stages._replace(orthogonalize=orthogonalize)

    def _place_gradients(self, places: Sequence[int]) -> None:
        """Find the pieces of gradients on this rank. A stack is one view, because calls take time."""
        rank, pieces = self._rank, list[tuple[Rectangle, int, int]]()
        for parcel in (parcel for bucket in rank.program.buckets for parcel in bucket.stored):
            parameter = rank.plan.matrices[parcel.matrix].parameter
            stored = rank.storage[parameter].param
            for span in spans(parcel.piece):
                rectangle = rectangle_of(parameter, span, stored)
                pieces.append((rectangle, rectangle.of(stored).size(0), places[parcel.matrix]))
        pieces.sort(key=lambda piece: (piece[0].parameter, piece[0].start))
        self._single, self._stacks = list[Rectangle](), list[tuple[int, int]]()
        single, stacked = list[int](), list[int]()
        for parameter, group in groupby(pieces, key=lambda piece: piece[0].parameter):
            rectangles, rows, numbers = zip(*group, strict=True)
            # Full rows, of equal height, and all rows of the shard.
            is_stack = all(isinstance(r.place, slice) and r.place.step is None for r in rectangles)
            if is_stack and len(set(rows)) == 1 and sum(rows) == rank.storage[parameter].param.size(0):
                self._stacks.append((parameter, len(rows)))
                stacked += numbers
            else:
                self._single += rectangles
                single += numbers
        self._numbers = rank.on_device(torch.tensor([*single, *stacked], dtype=torch.int64, device="cpu"))

    def before(self, step: Step) -> None:
        self._warn()
        # A missing gradient is another fault.
        active = torch.ones(1, 1, device=self._rank.storage[0].param.device if self._rank.storage else "cpu")
        singles = [active if (g := step.grads[part.parameter]) is None else part.of(g) for part in self._single]
        largest = [torch.stack(torch._foreach_norm(singles, math.inf, dtype=torch.float32))] if singles else []
        for parameter, count in self._stacks:
            stack = active.expand(count, 1) if (g := step.grads[parameter]) is None else g.reshape(count, -1)
            largest.append(torch.linalg.vector_norm(stack, math.inf, dim=1, dtype=torch.float32))
        self._states.zero_()
        if largest:
            states = torch.cat(largest).ne_(0).to(self._states, non_blocking=True).add_(ZERO)
            self._states.scatter_reduce_(0, self._numbers, states, "amax")
        self._of_rank = self._states.clone() if self._own is not None else self._states
        self._work = self._agreement.start_max_over_peers(self._states) if self._rank.plan.buckets else None
        self._agreed = False

    def _agree(self) -> None:
        if self._agreed:
            return
        self._agreed = True
        if self._work is not None:
            self._work.wait()
        states = self._states if self._own is None else torch.where(self._own, self._of_rank, self._states)
        torch.eq(states, ZERO, out=self._idle)

    def after(self) -> None:
        self._agree()
        self._on_host.copy_(self._idle, non_blocking=True)

    def _warn(self) -> None:
        # The copy has arrived, because the step has read the report, which was sent later.
        self._steps = torch.where(self._on_host, self._steps + 1, 0)
        new = (self._steps >= IDLE_STEPS) & (self._named == 0)
        if not new.any():
            return
        self._named = self._named | new
        names = [self._name(number) for number in new.nonzero().flatten().tolist()]
        warn(
            f"{listed(names)}: the gradient was zero in each of {IDLE_STEPS} steps, so the matrix "
            "gets no update (idle = 'hold'); look for an expert without tokens, or a branch that the loss does not use"
        )

    def _name(self, number: int) -> str:
        matrix = self._rank.plan.matrices[number]
        parameter = self._rank.plan.parameters[matrix.parameter]
        matrices = parameter.stack.matrices
        label = f" {matrices[matrix.index].label}" if len(matrices) > 1 and matrix.slice is None else ""
        return f"{parameter.fqn}{label}"
