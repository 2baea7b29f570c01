"""`missing_grad="skip"` and `nonfinite="skip"`: a step leaves out matrices without a usable gradient, on all ranks."""

# [Note: skipped matrices]
# - A skipped matrix keeps its momentum and its weights on every rank. So all holders must know of a missing or
#   non-finite gradient before the momentum advances.
# - The ranks decide on the device, by a maximum over the ranks that share matrices. On NCCL no host waits.
# - The calls of a step run as always. Then skipped matrices get back the values from before the call.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..step.batch import Batch
from ..step.feature import Feature
from ..step.foreach import Advance, Apply, Rectangle
from ..step.gradients import Step
from ..step.stages import BucketRun, OnDevice, RankStages, Stages
from ..step.update import Tensors


class Skips(Feature):
    """Finds the matrices to skip in a step, and keeps their weights, momentum and rule states."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._by_matrix: Sequence[Tensor] = ()

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        self._rank = rank
        self._flags = torch.zeros(len(rank.plan.matrices), dtype=torch.int32, device=rank.device)
        parts = [part for run in rank.runs for advance in run.advances for part in advance.parts]
        self._parts, self._places = parts, self._numbers(part.matrix for part in parts)
        self._parameters = self._numbers(part.parameter for part in parts)
        rank.source = KeepingSource(rank.source, self)
        rank.runs = tuple(self._with_masks(run) for run in rank.runs)
        return stages

    def _with_masks(self, run: BucketRun) -> BucketRun:
        batches = []
        for batch_run in run.batches:
            batch = batch_run.batch
            fields = (batch.matrices, batch.whole, batch.parameters, batch.iteration, batch.method)
            masked = MaskedBatch(*fields, batch, self._numbers(batch.matrices), self._flags)
            batches.append(replace(batch_run, batch=masked))
        return replace(run, batches=tuple(batches))

    def _numbers(self, numbers: Iterator[int] | Sequence[int]) -> Tensor:
        """Indices as a tensor on the device, without a wait of the host."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        if self._rank.device.type != "cpu":
            tensor = tensor.pin_memory().to(self._rank.device, non_blocking=True)
        return tensor

    def before(self, step: Step) -> None:
        """Find the matrices to skip, by a collective of the ranks that share matrices."""
        rank, flags = self._rank, self._flags.zero_()
        if rank.options.missing_grad == "skip":
            missing = {i for i, p in enumerate(rank.params) if p.on_mesh and step.grads[i] is None} - step.excluded
            lacking = [
                number for number, matrix in enumerate(rank.plan.matrices) if missing and matrix.parameter in missing
            ]
            if lacking:
                flags.index_fill_(0, self._numbers(lacking), 1)
        if rank.options.nonfinite == "skip":
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
        self._rank.report.add_nonfinite(parameters, broken)

    @contextmanager
    def keeping(self, parts: Sequence[Rectangle], tensors: Tensors) -> Iterator[None]:
        """Give skipped parts back the values from before the context."""
        before = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(before, tensors)
        yield
        for part, old, tensor in zip(parts, before, tensors, strict=True):
            torch.where(self._by_matrix[part.matrix], old, tensor, out=tensor)


class KeepingSource(OnDevice):
    """The tensors of another source. Skipped parts keep their values."""

    def __init__(self, source: OnDevice, skips: Skips) -> None:
        self._source, self.changing = source, skips.keeping  # type: ignore[method-assign]

    def averages(self, advance: Advance) -> Tensors:
        return self._source.averages(advance)

    def grads(self, advance: Advance, step: Step) -> Tensors:
        return self._source.grads(advance, step)

    def params(self, apply: Apply) -> Tensors:
        return self._source.params(apply)


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """A batch whose skipped matrices are zero, so that rules keep their states.

    Attributes:
        inner: the batch with all matrices.
        numbers: (count,) indices of the matrices in the plan, on the device.
        flags: by matrix of the plan, positive to skip.
    """

    inner: Batch
    numbers: Tensor
    flags: Tensor

    def norms(self) -> Tensor:
        self.whole.masked_fill_((self.flags[self.numbers] > 0)[:, None, None], 0)
        return self.inner.norms()

    def orthogonalize(self, norms: Tensor) -> None:
        self.inner.orthogonalize(norms)
