"""`state_dtype="int8"`: a step decodes the momentum of each call and encodes the result, see [Note: 8-bit momentum]."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..state.eight_bit import decoded, encode
from ..step.feature import Feature
from ..step.foreach import Advance, Apply, Rectangle
from ..step.gradients import Step
from ..step.stages import OnDevice, RankStages, Stages
from ..step.update import Tensors
from ..tensors.dtensor import local
from ..tensors.storage import STEP


class EightBit(Feature):
    """Decodes and encodes the momentum around each call."""

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        rank.source = DecodedSource(rank.source, rank)
        return stages


class DecodedSource(OnDevice):
    """The tensors of another source, with the momentum in float32."""

    def __init__(self, source: OnDevice, rank: RankStages) -> None:
        self._source, self._rank = source, rank
        self._scales: list[Tensor] = []
        self._keys = [zlib.crc32(trained.fqn.encode()) for trained in rank.params]
        self._decoded: Tensors = ()
        for trained, storage in zip(rank.params, rank.storage, strict=True):
            assert trained.scales is not None, f"{trained.fqn}: int8 momentum without scales"
            scales, rows = local(trained.scales), storage.param.size(0)
            self._scales.append(scales.view(rows, scales.numel() // rows if rows else 0))

    def averages(self, advance: Advance) -> Tensors:
        pairs = zip(advance.parts, advance.averages, strict=True)
        self._decoded = [decoded(numbers, part.of(self._scales[part.parameter])) for part, numbers in pairs]
        return self._decoded

    def grads(self, advance: Advance, step: Step) -> Tensors:
        return self._source.grads(advance, step)

    def params(self, apply: Apply) -> Tensors:
        return self._source.params(apply)

    @contextmanager
    def changing(self, parts: Sequence[Rectangle], tensors: Tensors) -> Iterator[None]:
        """Encode the momentum after the call."""
        with self._source.changing(parts, tensors):
            yield
        if tensors is not self._decoded:
            return
        for part, momentum in zip(parts, tensors, strict=True):
            storage, step = self._rank.storage[part.parameter], self._rank.params[part.parameter].group[STEP]
            key = self._keys[part.parameter] + part.start * storage.param.size(1)
            encode(momentum, part.of_average(storage), part.of(self._scales[part.parameter]), key, step)
        self._decoded = ()
