"""Updates that a step leaves to the forward behind it, which has each layer's applied before it reads the weights."""

# [Note: updates in forward]
# - A step launches all its returns. The waits for those of the last rounds, and their stage 6, are left: nothing else
#   needs their buffers before the next step, and forward comes to their layers later.
# - What is applied later is what the step would have applied: by the hyperparameters of the step, which a scheduler
#   changes behind it.
# - It runs on a stream of its own. On the computing one it would come behind the forward of all layers before, and so
#   would the all-gather of the layer that waits for it.
# - No collective is launched later: to wait and to apply is each rank's own. So ranks may do it in any order, and at
#   different points of the program.
# - Whoever else reads or writes weights has all of it done first: a state dict, the next step, what loads.

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..build import Built
from ..options import OptionError
from ..step.foreach import Apply, but_for
from ..step.gradients import Gradients
from ..step.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Update:
    """Stage 6 of a bucket of a plan that was built, as a step has left it."""

    built: Built
    bucket: int
    applies: tuple[Apply, ...]
    params: frozenset[Tensor]

    def run(self) -> list[str]:
        """Wait for the results and apply them. Returns the parameters that are stored elsewhere by now, by their names:
        their update is lost."""
        self.built.exchange.wait(self.bucket)
        params, executor = self.built.planned.params, self.built.executor
        stored = {part.parameter for apply in self.applies for part in apply.parts}
        moved = {index for index in stored if not executor.storage[index].is_of_weights(params[index])}
        executor.update(but_for(self.applies, moved))
        return [params[index].fqn for index in sorted(moved)]


class Deferred:
    """The updates that are left, if any are.

    Args:
        active: whether steps leave some.

    Attributes:
        attached: whether the forward of a model has them applied.
        count: how many were left so far.
    """

    def __init__(self, *, active: bool) -> None:
        self.active, self.attached, self.count = active, False, 0
        self._updates: list[Update] = []
        # Of its own, and the one that steps compute on, of which the buffers are memory.
        self._stream: Any = None
        self._computing: Any = None

    @property
    def left(self) -> bool:
        """Whether there are any."""
        return bool(self._updates)

    def check(self, built: Built, scaling: Scaling | None) -> None:
        """Raise OptionError, on all ranks alike, if nothing would have the updates applied that a step leaves, or for a
        step that a GradScaler may skip."""
        if self.active and scaling is not None:
            raise OptionError("overlap", "= 'forward' cannot take back what a GradScaler skips; set 'none'")
        if self.active and not self.attached and built.planned.plan.buckets:
            raise OptionError(
                "overlap",
                "= 'forward' leaves updates to the forward of a model that was not told of them: call "
                "titan_muon.apply_in_forward(model, optimizer) once, before the first step, or set 'none'",
            )

    def apply(self, bucket: int, built: Built, gradients: Gradients) -> None:
        """Stage 6 of a bucket: done, or left."""
        planned, exchange, executor = built.planned, built.exchange, built.executor
        if not self.active or bucket not in planned.program.late:
            exchange.wait(bucket)
            executor.apply(bucket, gradients)
            return
        module = torch.get_device_module(planned.device)
        self._computing = module.current_stream()
        if self._stream is None:
            self._stream = module.Stream()
        self._stream.wait_stream(self._computing)
        self.count += 1
        stored = {planned.plan.matrices[piece.matrix].parameter for piece in exchange.buckets[bucket].stored}
        params = frozenset(planned.params[index].param for index in stored)
        self._updates.append(Update(built, bucket, executor.applies_of_now(bucket, gradients), params))

    def end(self, built: Built) -> None:
        """The step is over, and so are the buffers' uses unless results are on their way to them."""
        if not self._updates:
            built.overlap.memory.free()

    def waits(self, params: Collection[Tensor]) -> bool:
        """Whether the update of one of these parameters is left."""
        return any(not update.params.isdisjoint(params) for update in self._updates)

    @torch.no_grad()
    def finish(self, params: Collection[Tensor], streams: Iterable[Any]) -> None:
        """Apply what is left of these parameters, before what comes next on `streams`."""
        # Where a rank stores nothing of a bucket its results are waited for with the first that comes.
        self._finish([u for u in self._updates if not u.params or not u.params.isdisjoint(params)])
        # Also for what was applied before: a bucket has matrices of several modules, which read them on other streams.
        for stream in streams:
            stream.wait_stream(self._stream)

    @torch.no_grad()
    def finish_all(self) -> None:
        """Apply all that is left, before what comes next on the current stream."""
        if self._updates:
            module = torch.get_device_module(self._updates[0].built.planned.device)
            self._finish(list(self._updates))
            module.current_stream().wait_stream(self._stream)

    def _finish(self, chosen: list[Update]) -> None:
        if not chosen:
            return
        built = chosen[0].built
        module = torch.get_device_module(built.planned.device)
        self._updates = [update for update in self._updates if update not in chosen]
        with module.stream(self._stream):
            lost = [fqn for update in chosen for fqn in update.run()]
        if not self._updates:
            # What is given back is used again on the stream that it is memory of.
            self._computing.wait_stream(self._stream)
            built.overlap.memory.free()
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: given other storage before their update was applied, which is lost; call "
                "finish_step() of Muon before weights are replaced, or set overlap = 'none'"
            )
