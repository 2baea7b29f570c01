"""`overlap="forward"`: each layer applies the updates of the last step in the next forward, before use."""

# [Note: updates in forward]
# - A step launches all returns, but leaves the apply stage of the last rounds to forward, because their buffers are
#   free until the next step.
# - A late update uses the hyperparameters of its step, even if a scheduler changes them after the step.
# - Late updates run on a separate stream, because on the computing stream they would wait for all earlier layers.
# - A late update launches no collective, so ranks may apply updates in any order.

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..options import OptionError
from ..step.feature import Feature
from ..step.foreach import Apply, without_parameters
from ..step.gradients import Step
from ..step.ranges import trace_range
from ..step.rule import Rule
from ..step.stages import RankStages, Stages


@dataclass(frozen=True, eq=False)
class Update:
    """The late apply stage of a bucket."""

    rank: RankStages
    bucket: int
    applies: tuple[Apply, ...]
    params: frozenset[Tensor]
    rule: Rule

    def run(self) -> list[str]:
        """Apply the updates. Returns parameters with replaced storage, whose updates are lost."""
        params = self.rank.params
        stored = {part.parameter for call in self.applies for part in call.parts}
        moved = {index for index in stored if not self.rank.storage[index].is_of_weights(params[index])}
        with trace_range("apply", self.bucket):
            self.rank.receive(self.bucket, late=True)
            for call in without_parameters(self.applies, moved):
                self.rank.calls.update(call, call.params, self.rule)
        return [params[index].fqn for index in sorted(moved)]


class LateApplies(Feature):
    """The late updates of steps, see [Note: updates in forward].

    `attached`: whether a forward applies late updates. `count`: late updates so far.
    """

    def __init__(self) -> None:
        self.attached, self.count = False, 0
        self._updates: list[Update] = []
        self._stream: Any = None
        self._computing: Any = None

    @property
    def left(self) -> bool:
        return bool(self._updates)

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        def apply(bucket: int, step: Step) -> None:
            if bucket in rank.program.late:
                self._leave(bucket, step, rank)
            else:
                stages.apply(bucket, step)

        return stages._replace(apply=apply)

    def ready(self, rank: RankStages) -> None:
        """Raise OptionError on all ranks if no forward will apply the late updates of a step."""
        if not self.attached and rank.plan.buckets:
            raise OptionError(
                "overlap",
                "= 'forward' leaves updates to a forward, but no model applies them: call "
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
        calls = without_parameters(rank.runs[bucket].applies, step.excluded)
        applies = tuple(call.with_current_group() for call in calls)
        self._updates.append(Update(rank, bucket, applies, params, rank.rule))
        self.holds_buffers = True

    def waits(self, params: Collection[Tensor]) -> bool:
        return any(not update.params.isdisjoint(params) for update in self._updates)

    @torch.no_grad()
    def finish(self, params: Collection[Tensor], streams: Iterable[Any]) -> None:
        """Apply updates of `params` before the next work on `streams`."""
        # A bucket without local parameters is finished together with the first other bucket.
        self._finish([u for u in self._updates if not u.params or not u.params.isdisjoint(params)])
        # Even without a new update: another module may have applied a shared bucket.
        for stream in streams:
            stream.wait_stream(self._stream)

    @torch.no_grad()
    def flush(self, *, discard: bool = False) -> None:
        if self._updates:
            module = torch.get_device_module(self._updates[0].rank.device)
            self._finish(list(self._updates))
            module.current_stream().wait_stream(self._stream)

    def _finish(self, updates: list[Update]) -> None:
        if not updates:
            return
        rank = updates[0].rank
        self._updates = [update for update in self._updates if update not in updates]
        with torch.get_device_module(rank.device).stream(self._stream):
            lost = [fqn for update in updates for fqn in update.run()]
        if not self._updates:
            self.holds_buffers = False
            # The computing stream may reuse the memory at once.
            self._computing.wait_stream(self._stream)
            rank.buffers.memory.free()
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: storage was replaced before the update was applied, and the update is lost; call "
                "finish_step() of Muon before weights are replaced, or set overlap = 'none'"
            )
