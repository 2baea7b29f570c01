"""Stochastic rounding of bfloat16 weights, which keeps small updates on average."""

# [Note: draws]
# - bfloat16 is the upper half of float32. A step adds a uniform 16-bit number, the draw, to the bits of the float32
#   weight and clears the lower half. The mean is unchanged.
# - A draw is a hash of the step, the matrix, and the element's index in the matrix. So replicas get equal draws, and a
#   resume needs only the step count.
# - A shard of whole rows gets the same draws as in one process. A shard of columns gets different draws.

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..engine.layout.work import ROUNDING_BYTES
from ..engine.step.foreach import Tensors
from ..kernels.draws import hash_counts, seed_of, wrapped

CHUNK_ALIGNMENT = 16
"""Elements of a chunk, for vectorized kernels."""

UPPER_HALF = -(2**16)


@dataclass(frozen=True)
class RoundedTogether:
    """Tensors updated and rounded together.

    Attributes:
        starts: for each tensor, the number to add to a position in `memory` to get the element's random counter.
        wide: the weights, as views of row 0 of `memory`.
        added: the updates, as views of row 1.
        draws: views of row 1 as int32.
        memory: (3, elements) float32.
    """

    starts: tuple[int, ...]
    wide: tuple[Tensor, ...]
    added: tuple[Tensor, ...]
    draws: tuple[Tensor, ...]
    memory: Tensor

    @property
    def firsts(self) -> list[int]:
        return [start + int(view.storage_offset()) for start, view in zip(self.starts, self.wide, strict=True)]

    def only(self, kept: Sequence[bool]) -> RoundedTogether:
        places = [place for place, keep in enumerate(kept) if keep]
        starts = tuple(self.starts[place] for place in places)
        wide, added, draws = (tuple(views[i] for i in places) for views in (self.wide, self.added, self.draws))
        return RoundedTogether(starts, wide, added, draws, self.memory)

    def update(self, params: Tensors, updates: Tensors, apply: Callable[[Tensors, Tensors], None], step: int) -> None:
        torch._foreach_copy_(self.wide, params)
        torch._foreach_copy_(self.added, updates)
        # On the whole memory: one kernel for all tensors.
        wide, added, _ = self.memory.unbind()
        apply([wide], [added])
        # CUDA's NaN has all bits set, and adding a draw would overflow to zero.
        wide.nan_to_num_(math.nan, math.inf, -math.inf)
        bits, draws, spare = self.memory.view(torch.int32).unbind()
        self._draw(draws, spare, step)
        bits.add_(draws).bitwise_and_(UPPER_HALF)
        torch._foreach_copy_(params, self.wide)

    def _draw(self, draws: Tensor, spare: Tensor, step: int) -> None:
        first = seed_of(step)
        torch.arange(first, first + draws.numel(), out=draws, device=draws.device)
        torch._foreach_add_(self.draws, self.starts)
        hash_counts(draws, spare)


class StochasticRounding:
    """Rounds the weights in bfloat16, see [Note: draws]."""

    element_bytes = ROUNDING_BYTES

    def applies_to(self, param: Tensor) -> bool:
        return param.dtype == torch.bfloat16

    def first_draw(self, fqn: str, index: int) -> int:
        """The count of the first element of a matrix. Further elements, in row-major order, have the next counts."""
        return zlib.crc32(f"{fqn} {index}".encode())

    def memory_bytes(self, tensor: Tensor) -> int:
        """Bytes in a chunk."""
        return ROUNDING_BYTES * _aligned(tensor.numel())

    def chunk(self, shapes: Sequence[torch.Size], firsts: Sequence[int], scratch: Tensor) -> RoundedTogether:
        """A chunk in `scratch`. `firsts`: counts of the first elements."""
        ends = list(accumulate((_aligned(shape.numel()) for shape in shapes), initial=0))
        memory = scratch[: ROUNDING_BYTES * ends[-1]].view(torch.float32).view(3, ends[-1])
        starts = tuple(wrapped(first - place) for first, place in zip(firsts, ends, strict=False))
        wide, added, draws = (
            tuple(flat[place : place + shape.numel()].view(shape) for place, shape in zip(ends, shapes, strict=False))
            for flat in (memory[0], memory[1], memory[1].view(torch.int32))
        )
        return RoundedTogether(starts, wide, added, draws, memory)


def _aligned(elements: int) -> int:
    return -(-elements // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
