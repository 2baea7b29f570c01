"""`state_dtype="int8"`: decodes the momentum of each call and encodes the result, see [Note: 8-bit momentum]."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from torch import Tensor

from ..state.eight_bit import decoded, encode
from ..step.algorithm import Algorithm, Decorated, Tensors
from ..tensors.dtensor import local
from ..tensors.storage import STEP

if TYPE_CHECKING:
    from ..step.foreach import MomentumCall
    from ..step.rank import Rank


class EightBit(Decorated):
    """The outermost decorator, because restored numbers would not fit restored scales."""

    def __init__(self, inner: Algorithm, rank: Rank) -> None:
        super().__init__(inner)
        self._params, self._storage = rank.params, rank.storage
        self._keys = [zlib.crc32(trained.fqn.encode()) for trained in rank.params]
        self._scales: list[Tensor] = []
        for trained, storage in zip(rank.params, rank.storage, strict=True):
            assert trained.scales is not None, f"{trained.fqn}: int8 momentum without scales"
            scales, rows = local(trained.scales), storage.param.size(0)
            self._scales.append(scales.view(rows, scales.numel() // rows if rows else 0))

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        scales = [part.of(self._scales[part.parameter]) for part in call.parts]
        wide = [decoded(*pair) for pair in zip(momentum, scales, strict=True)]
        super().before_gather(call, wide, grads)
        if momentum is not call.momentum:
            # A copy of the numbers, and the scales are not to change.
            return
        for part, new, numbers, factors in zip(call.parts, wide, momentum, scales, strict=True):
            key = self._keys[part.parameter] + part.start * self._storage[part.parameter].param.size(1)
            encode(new, numbers, factors, key, self._params[part.parameter].group[STEP])
