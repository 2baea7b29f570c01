"""`state_dtype="int8"`: a step decodes the momentum of each call and encodes the result, see [Note: 8-bit momentum]."""

from __future__ import annotations

import zlib

from torch import Tensor

from ..state.eight_bit import decoded, encode
from ..step.feature import Feature
from ..step.foreach import Advance
from ..step.rule import Rule
from ..step.stages import RankStages, Stages
from ..step.update import Tensors
from ..tensors.dtensor import local
from ..tensors.storage import STEP


class EightBit(Feature):
    """Decodes and encodes the momentum around each call."""

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        calls, scales_of = rank.calls, list[Tensor]()
        keys = [zlib.crc32(trained.fqn.encode()) for trained in rank.params]
        for trained, storage in zip(rank.params, rank.storage, strict=True):
            assert trained.scales is not None, f"{trained.fqn}: int8 momentum without scales"
            scales, rows = local(trained.scales), storage.param.size(0)
            scales_of.append(scales.view(rows, scales.numel() // rows if rows else 0))

        def advance(call: Advance, averages: Tensors, grads: Tensors, rule: Rule) -> None:
            scales = [part.of(scales_of[part.parameter]) for part in call.parts]
            wide = [decoded(*pair) for pair in zip(averages, scales, strict=True)]
            calls.advance(call, wide, grads, rule)
            for part, momentum, numbers, factors in zip(call.parts, wide, averages, scales, strict=True):
                key = keys[part.parameter] + part.start * rank.storage[part.parameter].param.size(1)
                encode(momentum, numbers, factors, key, rank.params[part.parameter].group[STEP])

        rank.calls = calls._replace(advance=advance)
        return stages
