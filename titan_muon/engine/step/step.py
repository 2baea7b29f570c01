"""One step of Muon on this rank. A bucket is a generator: read `bucket` from top to bottom, and you know the step."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from ..exchange.exchange import Exchange
from ..orthogonalize import NO_UPDATE, frobenius_norms, zero_nonfinite_
from ..program.phases import Act
from ..program.program import Program
from .algorithm import Algorithm
from .foreach import MomentumCall, StepContext, without_parameters
from .gradients import StepGradients
from .views import Batch, BucketViews

Fetch = Literal["gather", "update"]
"""The element-wise work of a bucket: before its gather, or after its return."""

SuspendedBucket = Generator[None]
"""A bucket in a step, suspended while it is on the network."""

NOTHING: AbstractContextManager[object] = nullcontext()


def trace_range(stage: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """A range of a profiler's trace, such as "Muon.gather bucket 3", if a profiler records this thread."""
    # A private name: a record_function takes 9 us of the host without a profiler, and this call 0.05 us.
    if not torch.autograd._profiler_enabled():
        return NOTHING
    return record_function(f"Muon.{stage}" if bucket is None else f"Muon.{stage} bucket {bucket}")


class HostTensors(Protocol):
    """Momentum, gradients and weights on the host. The views of calls are made in its memory of the device."""

    def fetched(self, fetch: Fetch) -> AbstractContextManager[None]:
        """The tensors of the next element-wise work are on the device, in the order of the program's acts."""

    def synchronize(self) -> None: ...


class Passes(Protocol):
    """The element-wise work of each bucket, in the place of an algorithm's calls. Reads `StepGradients.scaling`.

    `orthogonalize`: assemble a batch, orthogonalize it and split the results. False: not done.
    """

    def advance(self, index: int) -> None: ...
    def orthogonalize(self, index: int, number: int) -> bool: ...
    def apply(self, index: int) -> None: ...


class Hook(Protocol):
    """Work before the first bucket of a step and after the last.

    `captured`: whether a CUDA graph can repeat it, because it reads no gradient and no number of the host.
    """

    captured: bool

    def begin(self, gradients: StepGradients) -> None: ...
    def end(self) -> None: ...


class Runner(Protocol):
    """Runs the buckets of a step. `release`: give up what it keeps, before buffers and process groups go."""

    def run(self, gradients: StepGradients) -> None: ...
    def release(self) -> None: ...


class LateUpdates(Protocol):
    """What ends the late buckets of a step. `holds_memory`: whether buffers are in use between steps."""

    @property
    def holds_memory(self) -> bool: ...
    def attach(self, rank: StepContext) -> None: ...
    def ready(self) -> None: ...
    def finish(self) -> None: ...
    def start(self, muon: MuonStep, views: BucketViews, gradients: StepGradients) -> SuspendedBucket: ...
    def keeps(self, index: int, running: dict[int, SuspendedBucket]) -> bool: ...


class UpdateMask:
    """The matrices without an update in a step: those that are not finite. Features add others."""

    def agree(self) -> None:
        """Wait for what other ranks know of the matrices, at the latest in `zero_`."""

    def zero_(self, batch: Batch, gradients: StepGradients) -> Tensor:
        """Zero the matrices of an assembled batch without an update. Returns the norms for `Algorithm.update`."""
        absent = list[int]()
        if gradients.excluded:
            absent = [place for place, parameter in enumerate(batch.parameters) if parameter in gradients.excluded]
        for place in absent:
            # Nothing was packed, and the workspace has old values.
            batch.whole[place].zero_()
        if gradients.scaling is not None:
            batch.whole.masked_fill_(gradients.scaling.skipped, 0)
        norms = frobenius_norms(batch.whole, batch.dtype)
        zero_nonfinite_(batch.whole, norms, batch.broken)
        for place in absent:
            norms[place] = NO_UPDATE
        return norms if gradients.scaling is None else norms.masked_fill_(gradients.scaling.skipped, NO_UPDATE)


@dataclass(frozen=True)
class MuonStep:
    """Runs a rank's program.

    Attributes:
        views: by bucket, the tensors of each call, made once from the plan.
        algorithm: plain or decorated.
        mask: which matrices get no update.
        overlap: what ends the late buckets. None: this step.
        offload: where momentum, gradients and weights are. None: on the device.
        hooks: what begins before the first bucket and ends after the last, outermost first.
        passes: the element-wise work. None: the calls of the views.
    """

    program: Program
    views: tuple[BucketViews, ...]
    exchange: Exchange
    algorithm: Algorithm
    mask: UpdateMask
    overlap: LateUpdates | None = None
    offload: HostTensors | None = None
    hooks: Sequence[Hook] = ()
    passes: Passes | None = None

    def bucket(self, views: BucketViews, gradients: StepGradients) -> SuspendedBucket:
        """From gradients to weights. At each `yield` other buckets run, while this one is on the network.

        A local bucket (an owned matrix, a whole expert) has the same stages, and its exchange does nothing.
        """
        algorithm, offload, passes, index = self.algorithm, self.offload, self.passes, views.index
        # Holders update the momentum of every shard that they store, and pack the shards into the send buffer.
        with trace_range("advance", index), NOTHING if offload is None else offload.fetched("gather"):
            if passes is not None:
                passes.advance(index)
            gathers = () if passes is not None else views.gathers
            for call in gathers if gradients.uniform else by_dtype(gathers, gradients):
                # A gradient is released after its last call.
                placed = [(gradients.grads[part.parameter], part.place) for part in call.parts]
                grads: list[Any] = [grad if place is None else grad[place] for grad, place in placed]  # type: ignore[index]
                if call.grads:
                    grads = [*call.grads]
                if gradients.inverse is not None:
                    grads = list(torch._foreach_mul(grads, gradients.inverse))
                algorithm.before_gather(call, call.momentum, grads)
        if views.releases:
            gradients.release(views.releases)
        with trace_range("gather", index):
            self.exchange.gather(index)
        yield  # Act.GATHER
        # Owners assemble their matrices, orthogonalize them and split the results.
        with trace_range("orthogonalize", index):
            self.exchange.wait(index)
            if views.cleared is not None:
                views.cleared.zero_()
            for number, (assemble, batch, split) in enumerate(views.batches):
                if passes is not None and passes.orthogonalize(index, number):
                    continue
                if assemble.targets:
                    torch._foreach_copy_(*assemble)
                norms = self.mask.zero_(batch, gradients)
                algorithm.update(batch, norms)
                if split.targets:
                    torch._foreach_copy_(*split)
        with trace_range("send_back", index):
            self.exchange.return_results(index)
        # A bucket that waits for a forward does not keep the gradients.
        excluded = gradients.excluded
        del gradients
        yield  # Act.ORTHOGONALIZE
        # Holders decay their weights and add the update.
        with trace_range("apply", index):
            self.exchange.wait(index)
            with NOTHING if offload is None else offload.fetched("update"):
                if passes is not None:
                    passes.apply(index)
                updates = () if passes is not None else views.updates
                for update in without_parameters(updates, excluded) if excluded else updates:
                    algorithm.after_return(update, update.params)
        # Act.APPLY: the generator ends.

    def run(self, gradients: StepGradients) -> None:
        """Resume each bucket once for each act of the program. The memory of the buckets is allocated."""
        for hook in self.hooks:
            hook.begin(gradients)
        overlap, running = self.overlap, dict[int, SuspendedBucket]()
        try:
            for act, index in self.program.acts:
                if act is Act.GATHER:
                    views = self.views[index]
                    if overlap is None:
                        running[index] = self.bucket(views, gradients)
                    else:
                        running[index] = overlap.start(self, views, gradients)
                if act is not Act.APPLY or overlap is None or not overlap.keeps(index, running):
                    next(running[index], None)
        finally:
            # Only after an error is a bucket still suspended.
            for bucket in running.values():
                bucket.close()
        for hook in reversed(self.hooks):
            hook.end()

    def release(self) -> None:
        """Nothing is kept."""


def by_dtype(calls: Iterable[MomentumCall], gradients: StepGradients) -> Iterator[MomentumCall]:
    """Calls by gradient dtype. Fills parts without a gradient with NaN, so that the owner makes a zero update."""
    for call in calls:
        calls_of = call.split(lambda part: gradients.dtype(part.parameter))
        for view in calls_of.pop(None).packed if None in calls_of else ():
            view.fill_(math.nan)
        yield from calls_of.values()
