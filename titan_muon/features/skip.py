"""`missing_grad="skip"` and `nonfinite="skip"`: a step leaves out matrices without a usable gradient, on all ranks."""

# [Note: skipped matrices]
# - A skipped matrix keeps its momentum and its weights on every rank. So all holders must know of a missing or
#   non-finite gradient before the momentum advances.
# - The ranks decide on the device, by a maximum over the ranks that share matrices.
# - The calls of a step run as always. Then skipped matrices get back the values from before the call.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.faults import Fault
from ..options import MuonOptions
from ..step.feature import Feature
from ..step.foreach import Advance, Apply, Rectangle
from ..step.gradients import Step
from ..step.rule import Rule
from ..step.stages import RankStages, Stages
from ..step.update import Tensors


class Skips(Feature):
    """See [Note: skipped matrices]."""

    def __init__(self, agreement: Agreement, options: MuonOptions) -> None:
        self._agreement = agreement
        chosen = {Fault.NOT_FINITE: options.nonfinite, Fault.NO_GRADIENT: options.missing_grad}
        self.allowed = tuple(fault for fault, choice in chosen.items() if choice == "skip")
        self._by_matrix: Sequence[Tensor] = ()

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        self._rank = rank
        self._flags = torch.zeros(len(rank.plan.matrices), dtype=torch.int32, device=rank.device)
        parts = [part for run in rank.runs for advance in run.advances for part in advance.parts]
        self._parts, self._places = parts, self._numbers(part.matrix for part in parts)
        self._parameters = self._numbers(part.parameter for part in parts)
        rank.mask(self._flags, range(len(rank.plan.matrices)))
        calls = rank.calls

        def advance(call: Advance, averages: Tensors, grads: Tensors, rule: Rule) -> None:
            with self._keeping(call.parts, averages):
                calls.advance(call, averages, grads, rule)

        def update(call: Apply, params: Tensors, rule: Rule) -> None:
            with self._keeping(call.parts, params):
                calls.update(call, params, rule)

        rank.calls = calls._replace(advance=advance, update=update)
        return stages

    def _numbers(self, numbers: Iterable[int]) -> Tensor:
        return self._rank.on_device(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"))

    def before(self, step: Step) -> None:
        rank, flags = self._rank, self._flags.zero_()
        if Fault.NO_GRADIENT in self.allowed:
            missing = {i for i, p in enumerate(rank.params) if p.on_mesh and step.grads[i] is None} - step.excluded
            lacking = [
                number for number, matrix in enumerate(rank.plan.matrices) if missing and matrix.parameter in missing
            ]
            if lacking:
                flags.index_fill_(0, self._numbers(lacking), 1)
        if Fault.NOT_FINITE in self.allowed:
            self._add_nonfinite(step)
        work = self._agreement.start_max_over_peers(flags)
        if work is not None:
            work.wait()
        self._by_matrix = (flags > 0).unbind()

    def _add_nonfinite(self, step: Step) -> None:
        kept = [place for place, part in enumerate(self._parts) if step.grads[part.parameter] is not None]
        if not kept:
            return
        grads = [self._parts[place].of(step.grads[self._parts[place].parameter]) for place in kept]
        # Offloaded gradients have their norms on the host.
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).to(
            self._flags.device, non_blocking=True
        )
        broken, every = norms.isfinite().logical_not_(), len(kept) == len(self._parts)
        places = self._places if every else self._numbers(self._parts[place].matrix for place in kept)
        parameters = self._parameters if every else self._numbers(self._parts[place].parameter for place in kept)
        self._flags.scatter_reduce_(0, places, broken.int(), "amax")
        self._rank.report.add_where(parameters, broken, Fault.NOT_FINITE)

    @contextmanager
    def _keeping(self, parts: Sequence[Rectangle], tensors: Tensors) -> Iterator[None]:
        """Give skipped parts back the values from before the context."""
        before = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(before, tensors)
        yield
        for part, old, tensor in zip(parts, before, tensors, strict=True):
            torch.where(self._by_matrix[part.matrix], old, tensor, out=tensor)
