"""Runs a program: the stages of a step, turn by turn, on tensors. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import update
from .exchange import Exchange, Load
from .faults import Alarm
from .orthogonalize import Iteration, Method, orthogonalize, zero_nonfinite_
from .params import Member, Storage
from .plan.layout import Span, spans
from .plan.program import Program
from .plan.schedule import Act
from .plan.stacks import stacks
from .plan.types import Plan

TOGETHER_BYTES = 2**25
"""Most bytes of pieces that an accelerator advances the momentum of in one launch; as many are new memory meanwhile."""


@dataclass(frozen=True)
class Stack:
    """Matrices of this rank that are orthogonalized together.

    Attributes:
        matrices: by index in the plan.
        whole: (count, rows, cols), where they are made whole.
        parameters: (count,) the index of each one's parameter, on the device.
        iteration: what is computed.
        method: how.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    parameters: Tensor
    iteration: Iteration
    method: Method


@dataclass(frozen=True)
class Patch:
    """A rectangle of a stored piece whose momentum goes into `packed`, if anywhere, or whose update is `packed`."""

    parameter: int
    span: Span
    packed: Tensor | None
    scale: float


class Executor:
    """The stages of a Muon step but the first, on this rank.

    Args:
        plan: of the step.
        program: this rank's part of it.
        exchange: moves the pieces.
        members: the plan's parameters, in its order.
        iterations: of each of them.
        methods: of each of the plan's works.
        alarm: hears of matrices that are not finite, whose update is then zero; None to let them be.
        releases: whether to drop each gradient once its last piece is packed.
        workspace: dtype and device in which matrices are made whole.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        exchange: Exchange,
        members: Sequence[Member],
        iterations: Sequence[Iteration],
        methods: Sequence[Method],
        alarm: Alarm | None,
        *,
        releases: bool,
        workspace: tuple[torch.dtype, torch.device],
    ) -> None:
        self._plan = plan
        self._program = program
        self._exchange = exchange
        self._members = members
        self._iterations = iterations
        self._methods = methods
        self._alarm = alarm
        self._releases = releases
        self._together = 0 if workspace[1].type == "cpu" else TOGETHER_BYTES
        self._pieces = {item.matrix: spans(item.piece) for item in program.home}
        self._last_bucket = {
            plan.matrices[parked.matrix].parameter: index
            for index, load in enumerate(exchange.loads)
            for parked in load.stored
        }
        at_home = stacks(tuple(self._pieces), plan.matrices, plan.works)
        in_runs = [stacks(run.matrices, plan.matrices, plan.works) for run in program.runs]
        largest = max((self._numel(stack) for run in (at_home, *in_runs) for stack in run), default=0)
        whole = torch.empty(largest, dtype=workspace[0], device=workspace[1])
        self._at_home = tuple(self._stack(stack, whole) for stack in at_home)
        self._in_runs = tuple(tuple(self._stack(stack, whole) for stack in run) for run in in_runs)
        self.planned = len(program.home) + sum(len(run.matrices) for run in program.runs)
        self.orthogonalized = 0

    def _numel(self, stack: Sequence[int]) -> int:
        return len(stack) * self._plan.matrices[stack[0]].numel

    def _stack(self, chosen: tuple[int, ...], workspace: Tensor) -> Stack:
        first = self._plan.matrices[chosen[0]]
        parameters = [self._plan.matrices[matrix].parameter for matrix in chosen]
        whole = workspace[: self._numel(chosen)].view(len(chosen), first.rows, first.cols)
        indices = torch.tensor(parameters, device=workspace.device)
        return Stack(chosen, whole, indices, self._iterations[first.parameter], self._methods[first.work])

    def run(self, storage: list[Storage | None]) -> None:
        """All turns of the step. `storage` are the parameters in the plan's order, None for those to be left alone.

        Raises RuntimeError if not as many matrices were orthogonalized as planned.
        """
        self.orthogonalized = 0
        for act, number in self._program.turns:
            if act is Act.HOME:
                self._home(storage)
                continue
            for index in self._program.rounds[number]:
                match act:
                    case Act.GATHER:
                        self._gather(index, storage)
                    case Act.ORTHOGONALIZE:
                        self._orthogonalize(index, storage)
                    case Act.APPLY:
                        self._apply(index, storage)
        if self._alarm is not None:
            self._alarm.send()
        if self.orthogonalized != self.planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {self.planned} planned on this rank")

    def _gather(self, index: int, storage: list[Storage | None]) -> None:
        """Stages 2 and 3: advance the momentum of each stored piece, and send it to where it is orthogonalized."""
        load = self._exchange.loads[index]
        self._momentum(
            (
                patch
                for parked in load.stored
                for patch in self._patches(parked.matrix, parked.spans, load.packed.get(parked.matrix))
            ),
            storage,
        )
        self._release((parked.matrix for parked in load.stored), storage, index)
        self._exchange.gather(index)

    def _release(self, read: Iterable[int], storage: list[Storage | None], index: int) -> None:
        """Drop the gradients whose last matrix was read in bucket `index`, or at home (-1)."""
        if not self._releases:
            return
        for parameter in {self._plan.matrices[matrix].parameter for matrix in read}:
            stored = storage[parameter]
            if stored is not None and self._last_bucket.get(parameter, -1) == index:
                storage[parameter] = replace(stored, grad=None)
                self._members[parameter].parameter.grad = None

    def _orthogonalize(self, index: int, storage: Sequence[Storage | None]) -> None:
        """Stages 4 and 5: make owned matrices whole, orthogonalize them in stacks, and send their pieces back."""
        self._exchange.wait(index)
        load = self._exchange.loads[index]
        if load.cleared is not None:
            load.cleared.zero_()
        for stack in self._in_runs[index]:
            _make_whole(stack, load)
            # Not a variable: a result would outlive its turn, and two stacks be in memory.
            _take_apart(self._newton_schulz(stack, storage), stack, load)
        self._exchange.return_(index)

    def _apply(self, index: int, storage: Sequence[Storage | None]) -> None:
        """Stage 6: decay each stored piece and add its update."""
        self._exchange.wait(index)
        stored = self._exchange.loads[index].stored
        self._update((p for parked in stored for p in self._patches(parked.matrix, parked.spans, parked.view)), storage)

    def _home(self, storage: list[Storage | None]) -> None:
        """Stages 2, 4 and 6 of the matrices that are whole here."""
        for stack in self._at_home:
            self._momentum(self._whole_patches(stack, stack.whole), storage)
            self._update(self._whole_patches(stack, self._newton_schulz(stack, storage)), storage)
        self._release(self._pieces, storage, index=-1)

    def _whole_patches(self, stack: Stack, tensor: Tensor) -> Iterator[Patch]:
        for place, matrix in enumerate(stack.matrices):
            yield from self._patches(matrix, self._pieces[matrix], tensor[place])

    def _patches(self, matrix: int, places: Sequence[Span], packed: Tensor | None) -> Iterator[Patch]:
        shape = self._plan.matrices[matrix]
        scale = update.lr_scale(self._members[shape.parameter].group["lr_scale"], shape.rows, shape.cols)
        for span in places:
            yield Patch(shape.parameter, span, None if packed is None else packed[span.piece], scale)

    def _momentum(self, patches: Iterable[Patch], storage: Sequence[Storage | None]) -> None:
        for (decay, nesterov, *_, packs), pieces in _batches(self._gradients(patches, storage), self._together):
            averages, grads, *packed = zip(*pieces, strict=True)
            update.momentum(averages, grads, packed[0] if packs else (), decay, nesterov, self._alarm is not None)

    def _gradients(self, patches: Iterable[Patch], storage: Sequence[Storage | None]) -> Iterator[_Piece]:
        for patch in patches:
            stored, group = storage[patch.parameter], self._members[patch.parameter].group
            if stored is None:
                continue
            assert stored.grad is not None, "a gradient is released after its last piece is packed"
            average, grad = stored.average[patch.span.local], stored.grad[patch.span.local]
            key = (group["momentum"], group["nesterov"], average.dtype, grad.dtype, patch.packed is not None)
            yield key, (average, grad) if patch.packed is None else (average, grad, patch.packed)

    def _update(self, patches: Iterable[Patch], storage: Sequence[Storage | None]) -> None:
        for (lr, scale, decay, *_), pieces in _batches(self._updates(patches, storage), self._together):
            params, updates = zip(*pieces, strict=True)
            update.apply(params, updates, lr, scale, decay)

    def _updates(self, patches: Iterable[Patch], storage: Sequence[Storage | None]) -> Iterator[_Piece]:
        for patch in patches:
            stored, group = storage[patch.parameter], self._members[patch.parameter].group
            if stored is None:
                continue
            assert patch.packed is not None, "every stored piece has an update"
            param = stored.param[patch.span.local]
            key = (group["lr"], patch.scale, group["weight_decay"], param.dtype, patch.packed.dtype)
            yield key, (param, patch.packed)

    def _newton_schulz(self, stack: Stack, storage: Sequence[Storage | None]) -> Tensor:
        self.orthogonalized += len(stack.matrices)
        for place, matrix in enumerate(stack.matrices):
            if storage[self._plan.matrices[matrix].parameter] is None:
                # Nothing was packed: what is there is of another step, or was never written.
                stack.whole[place].zero_()
        if self._alarm is not None:
            self._alarm.add(stack.parameters, zero_nonfinite_(stack.whole))
        return orthogonalize(stack.whole, stack.iteration, stack.method)


_Piece = tuple[tuple[Any, ...], tuple[Tensor, ...]]
"""What pieces must have alike to be processed together, and the tensors of one."""


def _batches(pieces: Iterable[_Piece], most: int) -> Iterator[tuple[tuple[Any, ...], list[tuple[Tensor, ...]]]]:
    """Pieces that are alike, in lists of at most `most` bytes of their first tensors, or of one piece."""
    open_: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    held: dict[tuple[Any, ...], int] = {}
    for key, tensors in pieces:
        if key in open_ and held[key] + tensors[0].nbytes > most:
            yield key, open_.pop(key)
        held[key] = tensors[0].nbytes + (held[key] if key in open_ else 0)
        open_.setdefault(key, []).append(tensors)
    yield from open_.items()


def _make_whole(stack: Stack, load: Load) -> None:
    _copy(
        (stack.whole[place][span.whole], source.view[span.piece])
        for place, matrix in enumerate(stack.matrices)
        for source in load.sources[matrix]
        for span in source.spans
    )


def _take_apart(result: Tensor, stack: Stack, load: Load) -> None:
    _copy(
        (target.view[span.piece], result[place][span.whole])
        for place, matrix in enumerate(stack.matrices)
        for target in load.targets[matrix]
        for span in target.spans
    )


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first."""
    targets, sources = zip(*pairs, strict=True)
    torch._foreach_copy_(targets, sources)
