"""`overlap="backward"`: a bucket is gathered in backward, as soon as its gradients are reduced."""

# [Note: gathers in backward]
# - All ranks launch gathers in the plan's order. A ready bucket waits for earlier buckets, and the step launches the
#   remaining gathers. Backward launches only the gathers at the start of a step, before any return.
# - Early gathers have separate process groups, because their order among FSDP's collectives differs between ranks.
# - Backward packs the input of Newton-Schulz without advancing the momentum, so that a failed backward changes nothing.
# - Launch counts differ between ranks. So after an abandoned backward every rank launches the remaining gathers and
#   waits before the next use of the buffers.

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.faults import Fault
from ..options import OptionError
from ..plan.program import replicated_plain
from ..plan.terms.types import Plan
from ..step.feature import Feature
from ..step.gradients import Step, grad_matrix
from ..step.ranges import trace_range
from ..step.stages import RankStages, Stages
from ..tensors.storage import TrainedParam, placement_key


class Packed(NamedTuple):
    """The packed inputs of a parameter's shards."""

    grad: Tensor
    version: int
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, trained: TrainedParam) -> Packed:
        assert trained.param.grad is not None, "a parameter is packed after its gradient is ready"
        grad = trained.param.grad
        # Not the version of the local gradient, which all gradients of an FSDP module share.
        return cls(grad, grad._version, trained.group["momentum"], trained.group["nesterov"])

    def is_current(self, trained: TrainedParam) -> bool:
        if trained.param.grad is None:
            return False
        current = Packed.of(trained)
        return current.grad is self.grad and current[1:] == self[1:]


def check_launch_order(device: str, environ: Mapping[str, str]) -> None:
    """Raise OptionError for settings by which a GPU runs collectives of different groups in the order of launches.

    This order differs between ranks, see [Note: gathers in backward], so ranks would wait for each other.
    """
    if device != "cuda":
        return
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if environ.get(name) == "1":
            raise OptionError(
                "overlap",
                f"= 'backward' may deadlock with {name}=1: the GPU then runs gathers and reductions of gradients "
                "in the order of their launches, which differs between ranks; unset the variable on every rank, or set "
                "'none'",
            )


def _first_rows(stored: Sequence[Tensor | None], parameters: Sequence[int]) -> Tensor | None:
    """(count,) float32 norms; None if a gradient is missing."""
    rows = [grad[:1] for index in parameters if (grad := stored[index]) is not None]
    if not rows or len(rows) < len(parameters):
        return None
    return torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float32))


class EarlyGathers(Feature):
    """The gathers of the first rounds, launched in the backward before the step.

    `needed`: for each of these gathers, the parameters with a shard on this rank, ascending.
    """

    def __init__(self, rank: RankStages) -> None:
        self.first = rank.program.first_gathers
        self.needed = [sorted(rank.parameters_of(bucket)) for bucket in self.first]
        self._numbers = [torch.tensor(needed, device=rank.device, dtype=torch.int64) for needed in self.needed]
        self._rows: dict[int, Tensor | None] = {}
        self._launched = 0
        self._packed: dict[int, Packed] = {}
        self._changed: set[int] = set()
        # Whether backward was entered since the last step, and whether its gathers are discarded.
        self._entered = self._abandoned = False
        self.module: Any = torch.get_device_module(rank.device)
        # On the gradients' stream, packing would delay the next reduction.
        self._stream = self.module.Stream()
        self._rank = rank
        check_launch_order(rank.device.type, os.environ)

    @staticmethod
    def check(plan: Plan) -> None:
        """Raise OptionError for plain tensors, because these have no hook after the reduction of gradients."""
        plain = [plan.parameters[index].fqn for index in replicated_plain(plan)]
        if plain:
            raise OptionError(
                "overlap",
                f"= 'backward' takes DTensors, and {', '.join(plain[:5])} are plain tensors, whose hooks run before "
                "DistributedDataParallel reduces the gradients; shard the model by fully_shard, or set 'none'",
            )

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        self._rank = rank

        def advance(bucket: int, step: Step) -> None:
            if not self._is_launched(bucket):
                stages.advance(bucket, step)
                return
            self._compare(self.first.index(bucket), step)
            # Pack nothing, because the send buffer is in use.
            rank.advance_parts([replace(call, packed=()) for call in rank.runs[bucket].advances], step)
            rank.release(bucket, step)

        def gather(bucket: int, step: Step) -> None:
            if not self._is_launched(bucket):
                stages.gather(bucket, step)

        return stages._replace(advance=advance, gather=gather)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Launch gathers, discarded after an exception. Collective."""
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
                # The user may now free gradients during packing.
                current.wait_stream(self._stream)

    def next(self) -> int | None:
        """The place in `first` of the next gather, if any."""
        return self._launched if self._launched < len(self.first) else None

    def launch(self, step: Step, packed: dict[int, Packed]) -> None:
        bucket, rank = self.first[self._launched], self._rank
        self._stream.wait_stream(self.module.current_stream())
        with trace_range("gather", bucket), self.module.stream(self._stream):
            for call in rank.runs[bucket].advances:
                for advance in rank.with_gradients(call, step):
                    if advance.packed:
                        rank.calls.pack(advance, advance.averages, advance.grads(step), rank.rule)
            rank.runs[bucket].repeats.run()
            rank.exchange.gather(bucket)
            self._rows[self._launched] = _first_rows(step.grads, self.needed[self._launched])
        self._launched += 1
        # Keep the record of the first bucket, so that the step detects a change between two buckets.
        self._packed = packed | self._packed

    def accumulated(self, index: int) -> None:
        if index in self._packed:
            self._changed.add(index)

    def begin(self, computing: Any) -> None:
        with self.module.stream(computing):
            self._rank.buffers.memory.take()
        self._stream.wait_stream(computing)

    def ready(self, rank: RankStages) -> None:
        """Complete abandoned gathers. Collective."""
        if not self._abandoned:
            return
        rank.buffers.memory.take()
        for bucket in self.first[self._launched :]:
            rank.exchange.gather(bucket)
        for bucket in self.first:
            rank.exchange.wait(bucket)
        rank.buffers.memory.free()
        self.after()

    def told(self, faults: Sequence[Fault]) -> None:
        """Mark the gathers as abandoned, in case the step raises."""
        self._abandoned = self._abandoned or self._entered

    def flush(self, *, discard: bool = False) -> None:
        if discard:
            self._abandoned = self._entered
            self.ready(self._rank)

    def faults(self, faults: Sequence[Fault]) -> Sequence[Fault]:
        params = self._rank.params
        changed = self._changed | {i for i, packed in self._packed.items() if not packed.is_current(params[i])}
        # The records would keep released gradients alive.
        self._packed = {}
        removed = {index for index in changed if params[index].param.grad is None}
        return [
            Fault.GRADIENT_REMOVED if i in removed else Fault.GRADIENT_CHANGED if i in changed else fault
            for i, fault in enumerate(faults)
        ]

    def after(self) -> None:
        self._launched, self._packed, self._changed, self._rows = 0, {}, set(), {}
        self._entered = self._abandoned = False

    def _is_launched(self, bucket: int) -> bool:
        return bucket in self.first[: self._launched]

    def _compare(self, place: int, step: Step) -> None:
        # Foreach calls and FSDP's accumulation do not change a DTensor's version. Clipping scales every row.
        before, now = self._rows[place], _first_rows(step.grads, self.needed[place])
        if before is not None and now is not None:
            changed = before.nan_to_num(-1) != now.nan_to_num(-1)
            self._rank.report.add_where(self._numbers[place], changed, Fault.GRADIENT_CHANGED)


class _Backward:
    def __init__(self, early: EarlyGathers, rank: RankStages) -> None:
        self._early, self._rank = early, rank
        self._missing = [set(parameters) for parameters in early.needed]
        self._computing = early.module.current_stream()
        self._begun = self._off = False

    @torch.no_grad()
    def ready(self, index: int, _: Tensor) -> None:
        if not self._begun:
            self._begin()
        self._early.accumulated(index)
        trained = self._rank.params[index]
        assert trained.param.grad is not None, "the hook runs once the gradient is accumulated"
        as_planned = self._rank.storage[index].is_of(trained) and placement_key(trained.param.grad) == trained.key
        # The step reports a fault.
        if self._off or not as_planned:
            return
        for missing in self._missing:
            missing.discard(index)
        while (place := self._early.next()) is not None and not self._missing[place]:
            self._launch(self._early.needed[place])

    def _begin(self) -> None:
        # Not earlier, because reading the report waits for the last step, and buffers add to the peak memory.
        self._begun = True
        # After a fault the step raises, or heals the momentum before packing.
        self._off = any(self._rank.report.read())
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
