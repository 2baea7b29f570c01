"""Gradients on their way from all ranks to the owners, overlapped with the backward pass that makes the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import Collectives
from .param_group import Group, OwnedParameter, Unit


class Reduction:
    """The gradients of one unit: summed over the shard group, and then over replicas, for their owner.

    Args:
        unit: whose gradients these are; a parameter without one counts as zero on this rank.
        parameters: those that are trained.
        dtype: of the sum and in transit.
        divisor: what the sum is divided by.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[OwnedParameter],
        dtype: torch.dtype,
        divisor: float,
        group: Group,
        collectives: Collectives,
    ) -> None:
        splits = unit.splits(parameters)
        self._mine = [parameter for parameter in parameters if parameter.owner == group.rank]
        self._group, self._divisor = group, divisor
        device = parameters[0].used.device
        self._all: Tensor | None = torch.empty(sum(splits), dtype=dtype, device=device)
        self._sum = torch.empty(splits[group.rank], dtype=dtype, device=device)
        for parameter, part in zip(parameters, _parts(self._all, parameters), strict=True):
            if parameter.unreduced is None:
                part.zero_()
            else:
                part.copy_(parameter.unreduced)
                parameter.unreduced = None
        self._works = collectives.reduce_scatter(self._sum, splits, self._all, group.shard)

    def advance(self) -> None:
        """Once the shard group is done, free what was sent, and start the sum over replicas, if there are any."""
        if self._all is None:
            return
        self._wait()
        self._all = None
        if self._group.replicate is not None and self._sum.numel() > 0:
            work = dist.all_reduce(self._sum, group=self._group.replicate, async_op=True)
            assert work is not None, "an asynchronous collective returns what there is to wait for"
            self._works = [work]

    def finish(self) -> None:
        """Give the owned parameters their gradients."""
        self.advance()
        self._wait()
        if self._divisor != 1:
            self._sum.div_(self._divisor)
        for parameter, part in zip(self._mine, _parts(self._sum, self._mine), strict=True):
            parameter.add_reduced(part)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def _parts(flat: Tensor, parameters: Sequence[OwnedParameter]) -> list[Tensor]:
    sizes = [parameter.face.shape.numel() for parameter in parameters]
    cuts = pairwise(accumulate(sizes, initial=0))
    return [flat[a:b].view(p.face.shape) for p, (a, b) in zip(parameters, cuts, strict=True)]


class Reductions:
    """The reductions of one backward pass, oldest first.

    One unit's gradients travel to the shard group, and with replicas those of the unit before it between them, while
    the next are made. Every rank starts them in the same order, that of its backward pass.
    """

    def __init__(self, group: Group, collectives: Collectives) -> None:
        self._group, self._collectives = group, collectives
        self._pending: deque[Reduction] = deque()

    @torch.no_grad()
    def start(self, unit: Unit, dtype: torch.dtype | None, divisor: float) -> None:
        """Send the unit's gradients to their owners."""
        parameters = list(unit.trained())
        if not parameters:
            return
        # Before anything is allocated for this unit.
        self._finish_but(0 if self._group.replicate is None else 1)
        chosen = parameters[0].used.dtype if dtype is None else dtype
        self._pending.append(Reduction(unit, parameters, chosen, divisor, self._group, self._collectives))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all that are under way."""
        self._finish_but(0)

    def _finish_but(self, left: int) -> None:
        for reduction in self._pending:
            reduction.advance()
        while len(self._pending) > left:
            self._pending.popleft().finish()
