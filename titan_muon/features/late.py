"""Updates that a step leaves to the next forward, where each layer applies its own before it reads the weights."""

# [Note: updates in forward]
# - A step launches all returns. It leaves the apply stage of the last rounds, because no other bucket needs their
#   buffers before the next step, and forward reaches their layers later.
# - A late update uses the hyperparameters of its step, which a scheduler changes after the step.
# - Late updates run on their own stream. On the computing stream, an update and the all-gather of its layer would wait
#   for the forward of all earlier layers.
# - A late update launches no collective. So ranks may apply in any order, and at different points of the program.
# - A state dict, the next step and loading apply all late updates first, because they read or write weights.

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..options import OptionError
from ..step.feature import Feature
from ..step.foreach import Apply, but_for
from ..step.gradients import Step
from ..step.stages import RankStages, Stages


@dataclass(frozen=True, eq=False)
class Update:
    """The apply stage of a bucket, as a step has left it."""

    rank: RankStages
    bucket: int
    applies: tuple[Apply, ...]
    params: frozenset[Tensor]

    def run(self) -> list[str]:
        """Wait for the results and apply them. Returns the names of parameters whose storage has moved meanwhile: their
        update is lost."""
        self.rank.exchange.wait(self.bucket)
        params = self.rank.params
        stored = {part.parameter for apply in self.applies for part in apply.parts}
        moved = {index for index in stored if not self.rank.storage[index].is_of_weights(params[index])}
        for apply in but_for(self.applies, moved):
            self.rank.update(apply, apply.params)
        return [params[index].fqn for index in sorted(moved)]


class LateApplies(Feature):
    """The updates that steps leave to the next forward.

    Attributes:
        attached: whether the forward of a model applies them.
        count: number of updates that steps have left so far.
    """

    def __init__(self) -> None:
        self.attached, self.count = False, 0
        self._updates: list[Update] = []
        # The stream of the updates, and the stream of the step, which owns the memory of the buffers.
        self._stream: Any = None
        self._computing: Any = None
        self._rank: RankStages | None = None

    @property
    def left(self) -> bool:
        """Whether updates are left."""
        return bool(self._updates)

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """Leave the apply stage of the last rounds to the next forward."""
        self._rank = rank

        def apply(bucket: int, step: Step) -> None:
            if bucket in rank.program.late:
                self._leave(bucket, step, rank)
            else:
                stages.apply(bucket, step)

        return stages._replace(apply=apply)

    def ready(self) -> None:
        """Raise OptionError, on all ranks alike, if no forward will apply the updates that a step leaves."""
        assert self._rank is not None, "stages are wrapped before the first step"
        if not self.attached and self._rank.plan.buckets:
            raise OptionError(
                "overlap",
                "= 'forward' leaves updates to the forward of a model that was not told of them: call "
                "titan_muon.apply_in_forward(model, optimizer) once, before the first step, or set 'none'",
            )

    def _leave(self, bucket: int, step: Step, rank: RankStages) -> None:
        module = torch.get_device_module(rank.device)
        self._computing = module.current_stream()
        if self._stream is None:
            self._stream = module.Stream()
        self._stream.wait_stream(self._computing)
        self.count += 1
        params = frozenset(rank.params[index].param for index in rank.parameters_of(bucket))
        applies = tuple(run.of_now() for run in but_for(rank.runs[bucket].applies, step.excluded))
        self._updates.append(Update(rank, bucket, applies, params))
        self.holds_buffers = True

    def waits(self, params: Collection[Tensor]) -> bool:
        """Whether the update of one of these parameters is left."""
        return any(not update.params.isdisjoint(params) for update in self._updates)

    @torch.no_grad()
    def finish(self, params: Collection[Tensor], streams: Iterable[Any]) -> None:
        """Apply what is left of these parameters, before the next work on `streams`."""
        # A bucket with no shard on this rank is waited on together with the first other bucket.
        self._finish([u for u in self._updates if not u.params or not u.params.isdisjoint(params)])
        # Also for earlier updates: a bucket has matrices of several modules, which read them on other streams.
        for stream in streams:
            stream.wait_stream(self._stream)

    @torch.no_grad()
    def flush(self, *, discard: bool = False) -> None:
        """Apply all that is left, before the next work on the current stream."""
        if self._updates:
            module = torch.get_device_module(self._updates[0].rank.device)
            self._finish(list(self._updates))
            module.current_stream().wait_stream(self._stream)

    def _finish(self, chosen: list[Update]) -> None:
        if not chosen:
            return
        rank = chosen[0].rank
        self._updates = [update for update in self._updates if update not in chosen]
        with torch.get_device_module(rank.device).stream(self._stream):
            lost = [fqn for update in chosen for fqn in update.run()]
        if not self._updates:
            self.holds_buffers = False
            # The buffers are memory of the computing stream, which may use it again at once.
            self._computing.wait_stream(self._stream)
            rank.buffers.memory.free()
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: given other storage before their update was applied, which is lost; call "
                "finish_step() of Muon before weights are replaced, or set overlap = 'none'"
            )
