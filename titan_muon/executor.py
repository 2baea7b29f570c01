"""Runs a program: the stages of a step, turn by turn, on tensors. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import update
from .exchange import Exchange, Load
from .orthogonalize import Algorithm, Coefficients
from .plan.layout import Span, spans
from .plan.program import Program
from .plan.schedule import Act
from .plan.types import Plan
from .storage import Member, Storage


class Executor:
    """The stages of a Muon step but the first, on this rank.

    Args:
        plan: of the step.
        program: this rank's part of it.
        exchange: moves the pieces.
        members: the plan's parameters, in its order.
        coefficients: of Newton-Schulz, for each of them.
        algorithm: that orthogonalizes.
        releases: whether to drop each gradient once its last piece is packed.
        device: where matrices are made whole.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        exchange: Exchange,
        members: Sequence[Member],
        coefficients: Sequence[Coefficients],
        algorithm: Algorithm,
        *,
        releases: bool,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._program = program
        self._exchange = exchange
        self._members = members
        self._coefficients = coefficients
        self._algorithm = algorithm
        self._releases = releases
        self._at_home = tuple((item.matrix, spans(item.piece)) for item in program.home)
        self._last_bucket = {
            plan.matrices[parked.matrix].parameter: index
            for index, load in enumerate(exchange.loads)
            for parked in load.stored
        }
        mine = [matrix for matrix, _ in self._at_home] + [m for run in program.runs for m in run.matrices]
        self.planned = len(mine)
        self.orthogonalized = 0
        largest = max((plan.matrices[matrix].numel for matrix in mine), default=0)
        self._workspace = torch.empty(largest, device=device, dtype=torch.bfloat16)

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
                        self._orthogonalize(index)
                    case Act.APPLY:
                        self._apply(index, storage)
        if self.orthogonalized != self.planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {self.planned} planned on this rank")

    def _gather(self, index: int, storage: list[Storage | None]) -> None:
        """Stages 2 and 3: advance the momentum of each stored piece, and send it to where it is orthogonalized."""
        load = self._exchange.loads[index]
        for parked in load.stored:
            self._momentum(parked.matrix, parked.spans, storage, load.packed.get(parked.matrix))
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

    def _orthogonalize(self, index: int) -> None:
        """Stages 4 and 5: make each owned matrix whole, orthogonalize it, and send its pieces back."""
        self._exchange.wait(index)
        load = self._exchange.loads[index]
        if load.cleared is not None:
            load.cleared.zero_()
        for matrix in load.matrices:
            self._orthogonalize_one(matrix, load)
        self._exchange.return_(index)

    def _orthogonalize_one(self, matrix: int, load: Load) -> None:
        whole = self._whole(matrix)
        for source in load.sources[matrix]:
            for span in source.spans:
                whole[span.whole].copy_(source.view[span.piece])
        result = self._newton_schulz(matrix, whole)
        for target in load.targets[matrix]:
            for span in target.spans:
                target.view[span.piece].copy_(result[span.whole])

    def _apply(self, index: int, storage: Sequence[Storage | None]) -> None:
        """Stage 6: decay each stored piece and add its update."""
        self._exchange.wait(index)
        for parked in self._exchange.loads[index].stored:
            self._update(parked.matrix, parked.spans, parked.view, storage)

    def _home(self, storage: list[Storage | None]) -> None:
        """Stages 2, 4 and 6 of the matrices that are whole here."""
        for matrix, places in self._at_home:
            whole = self._whole(matrix)
            self._momentum(matrix, places, storage, whole)
            self._update(matrix, places, self._newton_schulz(matrix, whole), storage)
        self._release((matrix for matrix, _ in self._at_home), storage, index=-1)

    def _momentum(
        self, matrix: int, places: Sequence[Span], storage: Sequence[Storage | None], into: Tensor | None
    ) -> None:
        parameter = self._plan.matrices[matrix].parameter
        group, stored = self._members[parameter].group, storage[parameter]
        if stored is None:
            return
        assert stored.grad is not None, "a gradient is released after its last piece is packed"
        for span in places:
            average, grad = stored.average[span.local], stored.grad[span.local]
            blended = update.momentum(average, grad, group["momentum"], group["nesterov"])
            if into is not None:
                into[span.piece].copy_(blended)

    def _update(self, matrix: int, places: Sequence[Span], delta: Tensor, storage: Sequence[Storage | None]) -> None:
        shape = self._plan.matrices[matrix]
        group, stored = self._members[shape.parameter].group, storage[shape.parameter]
        if stored is None:
            return
        scale = update.lr_scale(group["lr_scale"], shape.rows, shape.cols)
        for span in places:
            update.apply(stored.param[span.local], delta[span.piece], group["lr"], scale, group["weight_decay"])

    def _whole(self, matrix: int) -> Tensor:
        shape = self._plan.matrices[matrix]
        return self._workspace[: shape.numel].view(shape.rows, shape.cols)

    def _newton_schulz(self, matrix: int, whole: Tensor) -> Tensor:
        self.orthogonalized += 1
        parameter = self._plan.matrices[matrix].parameter
        return self._algorithm(whole, self._coefficients[parameter], self._members[parameter].group["eps"])
