"""Gathers that start in backward: a bucket travels as soon as its gradients are reduced, in the order of the plan."""

# [Note: gathers in backward]
# - All ranks launch the gathers of a group in the plan's order. A ready bucket waits for the buckets before it, and the
#   step launches the gathers that backward has not launched. Backward launches only the gathers that open a step, so
#   that no other collective of the buckets comes in between on any rank.
# - These gathers have their own process groups, because ranks launch them in different orders relative to FSDP's
#   collectives and the step's own checks.
# - Backward does not change the momentum. It packs the momentum as the step will compute it. So a failed backward
#   leaves no trace, and the step gives the same numbers whether a bucket travelled early or not.
# - Abandoned gathers must still complete, because launch counts differ between ranks. Every rank launches the remaining
#   gathers and waits, before the buffers are used again.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.faults import Fault, FaultReport
from ..options import OptionError
from ..plan.program import replicated_plain
from ..plan.terms.types import Plan
from ..step.feature import Feature
from ..step.gradients import Step, grad_matrix
from ..step.stages import RankStages, Stages
from ..tensors.storage import TrainedParam, placement_key


class Packed(NamedTuple):
    """The inputs from which the shards of a parameter were packed."""

    grad: Tensor
    version: int
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, trained: TrainedParam) -> Packed:
        """The inputs as they are now, of a parameter with a gradient."""
        assert trained.param.grad is not None, "a parameter is packed once it has a gradient"
        grad = trained.param.grad
        # The version of the DTensor, not of the local tensor: FSDP reduces the gradients of a module into one tensor.
        # Their local parts share a version, and clipping another optimizer's gradients would count as a change.
        return cls(grad, grad._version, trained.group["momentum"], trained.group["nesterov"])

    def is_of(self, trained: TrainedParam) -> bool:
        """Whether the inputs are still the same."""
        if trained.param.grad is None:
            return False
        now = Packed.of(trained)
        return now.grad is self.grad and now[1:] == self[1:]


def _first_rows(stored: Sequence[Tensor | None], parameters: Sequence[int]) -> Tensor | None:
    """The norms of the gradients' first rows, (count,) float32; None if one is missing."""
    rows = [grad[:1] for index in parameters if (grad := stored[index]) is not None]
    if not rows or len(rows) < len(parameters):
        return None
    return torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float32))


class EarlyGathers(Feature):
    """The gathers of the first rounds, launched in the backward before the step.

    Args:
        rank: stages of this rank.

    Attributes:
        needed: for each of the first gathers, the parameters whose shards this rank packs for it, ascending.
    """

    def __init__(self, rank: RankStages) -> None:
        self.first = rank.program.first_gathers
        self.needed = [sorted(rank.parameters_of(bucket)) for bucket in self.first]
        self._numbers = [torch.tensor(needed, device=rank.device, dtype=torch.int64) for needed in self.needed]
        # By the place of a bucket: the first rows of its gradients when they were packed.
        self._rows: dict[int, Tensor | None] = {}
        self._launched = 0
        self._packed: dict[int, Packed] = {}
        self._changed: set[int] = set()
        # Whether a backward was entered for the next step, and whether its gathers are to be discarded.
        self._entered = self._abandoned = False
        self.module: Any = torch.get_device_module(rank.device)
        # On the stream of the gradients, packing would delay the next gradients that FSDP reduces.
        self._stream = self.module.Stream()
        self._rank = rank

    @staticmethod
    def check(plan: Plan) -> None:
        """Raise OptionError for gradients without a hook that fires after their reduction."""
        plain = [plan.parameters[index].fqn for index in replicated_plain(plan)]
        if plain:
            raise OptionError(
                "overlap",
                f"= 'backward' takes DTensors, and {', '.join(plain[:5])} are plain tensors, whose gradients "
                "DistributedDataParallel reduces when their hooks have run; shard the model by fully_shard, or set "
                "'none'",
            )

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """Skip the packing and the gather of the buckets that backward has launched."""
        self._rank = rank

        def advance(bucket: int, step: Step) -> None:
            if not self._is_launched(bucket):
                stages.advance(bucket, step)
                return
            self._compare(self.first.index(bucket), step)
            # Nothing is packed, not even the NaN of a missing gradient, because the send buffer is in use.
            rank.advance_parts([replace(each, packed=()) for each in rank.runs[bucket].advances], step)
            rank.release(bucket, step)

        def gather(bucket: int, step: Step) -> None:
            if not self._is_launched(bucket):
                stages.gather(bucket, step)

        return stages._replace(advance=advance, gather=gather)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Launch gathers in this backward. If it raises, they are discarded. All ranks enter it together."""
        self.flush(discard=True)
        if not self.first:
            yield
            return
        self._entered = self._abandoned = True
        run, current = _Backward(self, self._rank), self.module.current_stream()
        with ExitStack() as hooks:
            for index in sorted(set[int]().union(*self.needed)):
                # FSDP calls the hook after the reduction, on the stream of the reduced gradient.
                hook = self._rank.params[index].param.register_post_accumulate_grad_hook(partial(run.ready, index))
                hooks.callback(hook.remove)
            try:
                yield
                self._abandoned = False
            finally:
                # After this point gradients may be freed, and packing may still read their memory.
                current.wait_stream(self._stream)

    def next(self) -> int | None:
        """The place among the first gathers of the next one to launch; None if all are launched."""
        return self._launched if self._launched < len(self.first) else None

    def launch(self, step: Step, packed: dict[int, Packed]) -> None:
        """Launch the next gather, of these gradients."""
        bucket, rank = self.first[self._launched], self._rank
        self._stream.wait_stream(self.module.current_stream())
        with self.module.stream(self._stream):
            for each in rank.runs[bucket].advances:
                for advance in rank.with_gradients(each, step):
                    if advance.packed:
                        grads = rank.source.grads(advance, step)
                        rank.rule.pack(advance.averages, grads, advance.packed, advance.group)
            rank.runs[bucket].repeats.run()
            rank.exchange.gather(bucket)
            self._rows[self._launched] = _first_rows(step.grads, self.needed[self._launched])
        self._launched += 1
        # Keep the record of the first bucket, so that the step detects a change made between two buckets.
        self._packed = packed | self._packed

    def accumulated(self, index: int) -> None:
        """Note that the gradient of a parameter has changed: too late if its shards were packed already."""
        if index in self._packed:
            self._changed.add(index)

    def begin(self, computing: Any) -> None:
        """Take the buffers, as memory of the stream that computes."""
        with self.module.stream(computing):
            self._rank.buffers.memory.take()
        self._stream.wait_stream(computing)

    def ready(self) -> None:
        """Complete gathers that were launched for nothing. All ranks call it at the same point of the program."""
        if not self._abandoned:
            return
        rank = self._rank
        rank.buffers.memory.take()
        for bucket in self.first[self._launched :]:
            rank.exchange.gather(bucket)
        for bucket in self.first:
            rank.exchange.wait(bucket)
        rank.buffers.memory.free()
        self.after()

    def told(self, faults: Sequence[Fault]) -> None:
        """Discard the launched gathers if the step raises for faults, which are the same on all ranks."""
        self._abandoned = self._abandoned or self._entered

    def flush(self, *, discard: bool = False) -> None:
        """With `discard`, drop the gathers that backward has launched."""
        if discard:
            self._abandoned = self._entered
            self.ready()

    def faults(self, found: Sequence[Fault]) -> Sequence[Fault]:
        """Add a fault for each gradient that differs from what was packed."""
        params = self._rank.params
        changed = self._changed | {i for i, packed in self._packed.items() if not packed.is_of(params[i])}
        # The records keep gradients alive, which the step may release.
        self._packed = {}
        return [Fault.GRADIENT_CHANGED if index in changed else fault for index, fault in enumerate(found)]

    def after(self) -> None:
        """Forget the backward of this step."""
        self._launched, self._packed, self._changed, self._rows = 0, {}, set(), {}
        self._entered = self._abandoned = False

    @property
    def report(self) -> FaultReport:
        """Faults of the step before."""
        return self._rank.report

    def _is_launched(self, bucket: int) -> bool:
        return bucket in self.first[: self._launched]

    def _compare(self, place: int, step: Step) -> None:
        """Note on the device which gradients were scaled since they were packed."""
        # Neither foreach calls nor FSDP, when it adds to a DTensor, change its version. Clipping scales all rows alike,
        # so one row is enough.
        before, now = self._rows[place], _first_rows(step.grads, self.needed[place])
        if before is not None and now is not None:
            self.report.add_changed(self._numbers[place], before.nan_to_num(-1) != now.nan_to_num(-1))


class _Backward:
    """One backward: which gradients are complete, and the gathers launched for them."""

    def __init__(self, early: EarlyGathers, rank: RankStages) -> None:
        self._early, self._rank = early, rank
        self._missing = [set(parameters) for parameters in early.needed]
        self._computing = early.module.current_stream()
        self._begun = self._off = False

    @torch.no_grad()
    def ready(self, index: int, _: Tensor) -> None:
        """Launch the gathers that this parameter's gradient completes."""
        if not self._begun:
            self._begin()
        self._early.accumulated(index)
        trained = self._rank.params[index]
        assert trained.param.grad is not None, "the hook runs once the gradient is accumulated"
        there = self._rank.storage[index].is_of(trained) and placement_key(trained.param.grad) == trained.key
        # The step decides what to do about a gradient or a storage that is not as planned.
        if self._off or not there:
            return
        for missing in self._missing:
            missing.discard(index)
        while (place := self._early.next()) is not None and not self._missing[place]:
            self._launch(self._early.needed[place])

    def _begin(self) -> None:
        # Not before the first gradient: the host would wait for the step before, and the buffers would take memory
        # while the activations of the whole model do.
        self._begun = True
        # After a fault the step heals the momentum first, or raises.
        self._off = any(self._early.report.read())
        if not self._off:
            self._early.begin(self._computing)

    def _launch(self, parameters: Sequence[int]) -> None:
        params, planned = self._rank.params, self._rank.plan.parameters
        grads: list[Tensor | None] = [None] * len(params)
        for index in parameters:
            grads[index] = grad_matrix(params[index].param.grad, planned[index])
        uniform = len({grad.dtype for grad in grads if grad is not None}) <= 1
        packed = {index: Packed.of(params[index]) for index in parameters}
        self._early.launch(Step(grads, frozenset(), uniform), packed)
