"""`overlap="forward"`: each layer's next forward ends the last buckets of a step, before its weights are used."""

# [Note: updates in forward]
# - A step launches all returns, but leaves the updates of the last rounds to forward, because no round reuses the
#   buffers before the next step.
# - A late update uses the hyperparameters of the step, also after a change by a scheduler.
# - Late updates run on a separate stream. On the computing stream an update would wait for all earlier layers.
# - A late update launches no collective, so ranks may end buckets in any order.

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.step.feature import Feature
from ..engine.step.foreach import StepContext, without_parameters
from ..engine.step.gradients import StepGradients
from ..engine.step.step import MuonStep, SuspendedBucket
from ..engine.step.views import BucketViews
from ..options import OptionError


@dataclass(frozen=True, eq=False)
class Suspended:
    """A bucket before its updates. `updates`: a list of the bucket, to take out lost updates."""

    updates: list[Any]
    params: frozenset[Tensor]
    bucket: SuspendedBucket
    rank: StepContext


class ForwardUpdates:
    """The late updates of a step, see [Note: updates in forward].

    `attached`: whether a forward ends them. `count`: buckets suspended so far.
    """

    def __init__(self) -> None:
        self.attached, self.count = False, 0
        self._starting: dict[int, list[Any]] = {}
        self._suspended: list[Suspended] = []
        self._stream: Any = None
        self._computing: Any = None

    @property
    def holds_memory(self) -> bool:
        """Whether buffers are in use between steps."""
        return bool(self._suspended)

    def attach(self, rank: StepContext) -> None:
        """Take the tensors of the next steps: at the start, and after storage has moved."""
        # Hooks in the model hold this object, and must not keep the memory of a deleted Muon.
        self._weak_rank, self._has_buckets = weakref.ref(rank), bool(rank.plan.buckets)
        self._module: Any = torch.get_device_module(rank.device)
        self._stream = self._stream or self._module.Stream()
        # An exception in a step of an earlier plan may have left some.
        self._starting.clear()

    def ready(self) -> None:
        """Raise OptionError on all ranks if no forward will do the late updates of a step."""
        if not self.attached and self._has_buckets:
            raise OptionError(
                "overlap",
                "= 'forward' leaves updates to a forward, but no model applies them: call "
                "titan_muon.apply_in_forward(model, optimizer) once, before the first step, or set 'none'",
            )

    def start(self, muon: MuonStep, views: BucketViews, gradients: StepGradients) -> SuspendedBucket:
        """The bucket, before Act.GATHER."""
        if views.index in muon.program.late:
            updates = self._starting[views.index] = [call.with_current_group() for call in views.updates]
            views = replace(views, updates=updates)  # type: ignore[arg-type]
        return muon.bucket(views, gradients)

    def keeps(self, index: int, running: dict[int, SuspendedBucket]) -> bool:
        """Whether the bucket stays suspended at Act.APPLY, and so leaves `running`."""
        if index not in self._starting:
            return False
        self._computing = self._module.current_stream()
        self._stream.wait_stream(self._computing)
        rank = self._weak_rank()
        assert rank is not None, "a step holds the rank"
        params = frozenset(rank.params[number].param for number in rank.parameters_of(index))
        self._suspended.append(Suspended(self._starting.pop(index), params, running.pop(index), rank))
        self.count += 1
        return True

    def waits(self, params: Collection[Tensor]) -> bool:
        return any(not suspended.params.isdisjoint(params) for suspended in self._suspended)

    @torch.no_grad()
    def end_for(self, params: Collection[Tensor], streams: Iterable[Any]) -> None:
        """End the buckets of `params` before the next work on `streams`."""
        # A bucket without local parameters ends together with the first other bucket.
        self._end([s for s in self._suspended if not s.params or not s.params.isdisjoint(params)])
        # Even without a bucket: another module may have ended a shared bucket.
        for stream in streams:
            stream.wait_stream(self._stream)

    @torch.no_grad()
    def finish(self) -> None:
        """End the buckets of the last step."""
        if self._suspended:
            self._end(list(self._suspended))
            self._module.current_stream().wait_stream(self._stream)

    def _end(self, ending: Sequence[Suspended]) -> None:
        if not ending:
            return
        self._suspended = [suspended for suspended in self._suspended if suspended not in ending]
        lost = []
        with self._module.stream(self._stream):
            for suspended in ending:
                lost += self._take_out_moved(suspended)
                next(suspended.bucket, None)
        if not self._suspended:
            # The computing stream may reuse the memory at once.
            self._computing.wait_stream(self._stream)
            ending[0].rank.buffers.memory.free()
        if lost:
            raise ValueError(
                f"{', '.join(lost)}: storage was replaced before the update was applied, and the update is lost; call "
                "finish_step() of Muon before weights are replaced, or set overlap = 'none'"
            )

    def _take_out_moved(self, suspended: Suspended) -> list[str]:
        """Take out updates of parameters with replaced storage. Returns the names of these parameters."""
        params, storage = suspended.rank.params, suspended.rank.storage
        stored = {part.parameter for call in suspended.updates for part in call.parts}
        moved = [index for index in sorted(stored) if not storage[index].is_of_weights(params[index])]
        suspended.updates[:] = without_parameters(suspended.updates, moved)
        return [params[index].fqn for index in moved]


class ForwardFeature(Feature):
    """The next forward ends the last buckets of a step."""

    def overlap(self) -> ForwardUpdates:
        return ForwardUpdates()
