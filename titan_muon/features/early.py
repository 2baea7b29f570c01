"""Gathers that start in backward: a bucket travels as soon as its gradients are reduced, in the plan's order."""

# [Note: gathers in backward]
# - All ranks launch the gathers of a group in the plan's order, whenever each of them does: a bucket that is ready
#   early waits for those before it, and what backward has not launched the step launches. Only what a step has before
#   anything else can be launched, so that no other collective of the buckets comes in between on any rank.
# - They have process groups that nothing else uses. Of FSDP's collectives, and of the step's own checks, some ranks
#   would have launched some before and others after them.
# - Momentum is not changed in backward: what is packed is what it will be. So a backward that fails leaves nothing
#   behind, and the step comes to the same numbers whether a bucket travelled before it or not.
# - What has been launched for nothing is completed before buffers are used anew: every rank launches the rest, whatever
#   is in it, and waits. Were each to forget its own, ranks that had launched more would go on with one gather too many.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.exchange import Exchange
from ..comm.faults import Fault, FaultReport
from ..comm.step_memory import StepMemory
from ..options import OptionError
from ..plan.program import Program
from ..plan.terms.schedule import Act
from ..step.executor import Executor, RankPlan
from ..step.gradients import Gradients, grad_matrix
from ..step.scaling import Scaling
from ..tensors.storage import TrainedParam, placement_key


class Packed(NamedTuple):
    """What a parameter's pieces were packed from."""

    grad: Tensor
    version: int
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, trained: TrainedParam) -> Packed:
        """What would be packed now of a parameter that has a gradient."""
        assert trained.param.grad is not None, "a parameter is packed once it has a gradient"
        grad = trained.param.grad
        # Not its local tensor's: FSDP reduces a module's gradients into one tensor, whose parts have one version. When
        # those of other optimizers are clipped, these would seem to have changed.
        return cls(grad, grad._version, trained.group["momentum"], trained.group["nesterov"])

    def is_of(self, trained: TrainedParam) -> bool:
        """Whether the same would be packed now."""
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


class Overlap:
    """The gathers of a step, those of the first rounds in the backward before it.

    Args:
        planned: plan of the step, and this rank's part in it.
        exchange: buffers and collectives of that part.
        report: what was wrong in the step before.
        active: whether any are launched in backward.

    Attributes:
        memory: the memory of the exchange's buffers, which backward and step take.
        needed: for each of the first gathers the parameters that are packed for it here, ascending.
    """

    def __init__(self, planned: RankPlan, exchange: Exchange, report: FaultReport, *, active: bool) -> None:
        self.exchange, self.report = exchange, report
        self.memory = StepMemory(exchange.buffers)
        self._ahead = first_gathers(planned.program) if active else ()
        stored = [exchange.buckets[bucket].stored for bucket in self._ahead]
        matrices = planned.plan.matrices
        self.needed = [sorted({matrices[piece.matrix].parameter for piece in pieces}) for pieces in stored]
        self._numbers = [torch.tensor(needed, device=planned.device, dtype=torch.int64) for needed in self.needed]
        # By the place of a bucket: its gradients' first rows when they were packed.
        self._rows: dict[int, Tensor | None] = {}
        self._launched = 0
        self._packed: dict[int, Packed] = {}
        self._changed: set[int] = set()
        # Whether there was a backward for the next step, and whether what it launched is for nothing.
        self._entered = self._abandoned = False
        self.module: Any = torch.get_device_module(planned.device)
        # Of its own: on the stream of the gradients, those that FSDP reduces next would wait for the packing.
        self._stream = self.module.Stream()

    @contextmanager
    def backward(self, planned: RankPlan, executor: Executor) -> Iterator[None]:
        """Meanwhile a backward launches gathers; they are for nothing if it raises. All ranks enter it together."""
        self.cancel()
        if not self._ahead:
            yield
            return
        self._entered = self._abandoned = True
        run, current = _Backward(self, planned, executor), self.module.current_stream()
        with ExitStack() as hooks:
            for index in sorted(set[int]().union(*self.needed)):
                # FSDP calls them as autograd does: behind the reduction, on the stream of the reduced gradient.
                hook = planned.params[index].param.register_post_accumulate_grad_hook(partial(run.ready, index))
                hooks.callback(hook.remove)
            try:
                yield
                self._abandoned = False
            finally:
                # Gradients may be freed from now on, and their memory used again, which their packing still reads.
                current.wait_stream(self._stream)

    def next(self) -> int | None:
        """The place among the first gathers of the one that comes next, or None if all are launched."""
        return self._launched if self._launched < len(self._ahead) else None

    def launch(self, executor: Executor, gradients: Gradients, packed: dict[int, Packed]) -> None:
        """Launch the next gather, of these gradients."""
        bucket = self._ahead[self._launched]
        self._stream.wait_stream(self.module.current_stream())
        with self.module.stream(self._stream):
            executor.pack_ahead(bucket, gradients)
            self.exchange.gather(bucket)
            self._rows[self._launched] = _first_rows(gradients.stored, self.needed[self._launched])
        self._launched += 1
        # Of a parameter in several buckets the first: if it changed before the last, the step sees that.
        self._packed = packed | self._packed

    def accumulated(self, index: int) -> None:
        """The gradient of a parameter has changed: too late if that was packed already."""
        if index in self._packed:
            self._changed.add(index)

    def begin(self, computing: Any) -> None:
        """Take the buffers, as memory of the stream that computes."""
        with self.module.stream(computing):
            self.memory.take()
        self._stream.wait_stream(computing)

    def settle(self) -> None:
        """Complete what was launched for nothing. All ranks come here at the same point of the program."""
        if not self._abandoned:
            return
        self.memory.take()
        for bucket in self._ahead[self._launched :]:
            self.exchange.gather(bucket)
        for bucket in self._ahead:
            self.exchange.wait(bucket)
        self.memory.free()
        self.finish()

    def abandon(self, faults: Sequence[Fault]) -> None:
        """What backward has launched is for nothing if there are faults, the same on all ranks; but for a step that
        goes on with it."""
        self._abandoned = self._abandoned or (self._entered and any(faults))

    def cancel(self) -> None:
        """What backward has launched, if there was one, is for nothing. All ranks come here together."""
        self._abandoned = self._entered
        self.settle()

    def checked(self, found: Sequence[Fault], params: Sequence[TrainedParam], scaling: Scaling | None) -> list[Fault]:
        """The faults of a step, and those of gradients that are no longer what was packed.

        Raises OptionError, on all ranks alike, for gradients that carry the scale of a GradScaler.
        """
        if self._entered and scaling is not None:
            raise OptionError("overlap", "= 'backward' would send gradients with a GradScaler's scale; set 'none'")
        changed = self._changed | {i for i, packed in self._packed.items() if not packed.is_of(params[i])}
        # No longer kept alive: a step may release them.
        self._packed = {}
        return [Fault.GRADIENT_CHANGED if index in changed else fault for index, fault in enumerate(found)]

    def gather(self, bucket: int, executor: Executor, gradients: Gradients) -> None:
        """Stages 2 and 3 of a bucket in the step: what is left to be done of them."""
        launched = bucket in self._ahead[: self._launched]
        if launched:
            self._compare(self._ahead.index(bucket), gradients)
        executor.advance_momentum(bucket, gradients, packs=not launched)
        if not launched:
            self.exchange.gather(bucket)

    def _compare(self, place: int, gradients: Gradients) -> None:
        """Note on the device whose gradients were scaled since they were packed."""
        # Neither foreach calls nor FSDP that adds to a DTensor change its version. Clipping scales all rows alike, so
        # that one of them tells.
        before, now = self._rows[place], _first_rows(gradients.stored, self.needed[place])
        if before is not None and now is not None:
            self.report.add_changed(self._numbers[place], before.nan_to_num(-1) != now.nan_to_num(-1))

    def finish(self) -> None:
        """The step is done."""
        self._launched, self._packed, self._changed, self._rows = 0, {}, set(), {}
        self._entered = self._abandoned = False


class _Backward:
    """One backward: which gradients are there, and the gathers that are launched for it."""

    def __init__(self, overlap: Overlap, planned: RankPlan, executor: Executor) -> None:
        self._overlap, self._planned, self._executor = overlap, planned, executor
        self._missing = [set(parameters) for parameters in overlap.needed]
        self._computing = overlap.module.current_stream()
        self._begun = self._off = False

    @torch.no_grad()
    def ready(self, index: int, _: Tensor) -> None:
        """The gradient of a parameter is there. Launches what it completes."""
        if not self._begun:
            self._begin()
        self._overlap.accumulated(index)
        trained = self._planned.params[index]
        assert trained.param.grad is not None, "the hook of a gradient that was accumulated"
        there = self._executor.storage[index].is_of(trained) and placement_key(trained.param.grad) == trained.key
        # What is not as it should be is left to the step, which knows what to do about it.
        if self._off or not there:
            return
        for missing in self._missing:
            missing.discard(index)
        while (place := self._overlap.next()) is not None and not self._missing[place]:
            self._launch(self._overlap.needed[place])

    def _begin(self) -> None:
        # With the first gradient and not before: the host would wait for the step before, and the buffers would be
        # there beside the activations of the whole model.
        self._begun = True
        # After a fault the step heals the momentum first, or raises.
        self._off = any(self._overlap.report.read())
        if not self._off:
            self._overlap.begin(self._computing)

    def _launch(self, parameters: Sequence[int]) -> None:
        params, planned = self._planned.params, self._planned.plan.parameters
        stored: list[Tensor | None] = [None] * len(params)
        for index in parameters:
            stored[index] = grad_matrix(params[index].param.grad, planned[index])
        uniform = len({grad.dtype for grad in stored if grad is not None}) <= 1
        packed = {index: Packed.of(params[index]) for index in parameters}
        self._overlap.launch(self._executor, Gradients(stored, frozenset(), uniform, None), packed)


def first_gathers(program: Program) -> tuple[int, ...]:
    """The buckets that a step gathers before it does anything else, in order."""
    turns = takewhile(lambda turn: turn.act is Act.GATHER, program.turns)
    return tuple(bucket for turn in turns for bucket in program.rounds[turn.round])
