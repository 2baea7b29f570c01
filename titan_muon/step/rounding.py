"""Stochastic rounding of bfloat16 weights: updates that rounding to the nearest would lose are kept on average."""

# [Note: draws]
# - A weight between two neighbours in bfloat16 becomes the upper one with a probability of its distance from the lower
#   one, so that its mean stays. bfloat16 is the upper half of float32: a uniform number of 16 bits is added to the bits
#   of the weight, and the lower half is cut off.
# - The number is a hash of the step, the matrix, and the element's place in it. So copies of a weight get equal ones,
#   whatever else is updated with them there, and nothing but the count of steps has to be saved for a resume.
# - Rows that are cut over ranks get what they would get in one process. Columns that are cut get other numbers.

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..plan.terms.layout import Span
from .update import Tensors

ALIGNMENT = 16
"""Elements at whose multiples tensors begin in the memory of a chunk, for kernels that read several at once."""
BYTES = 12
"""Memory for an element: the weight and its update in float32, the second of which is then the draw, and one spare."""

# Odd factors, of Knuth's multiplicative hashing and of MurmurHash3. The upper bits of a product are the good ones.
FACTORS = (0x9E3779B1, 0x85EBCA6B)
UPPER_HALF = -(2**16)
LOWER_HALF = 2**16 - 1


@dataclass(frozen=True)
class Draws:
    """The draws of a matrix: its elements, row by row, count on from `key`."""

    key: int
    cols: int

    @classmethod
    def of(cls, fqn: str, index: int, cols: int) -> Draws:
        """Those of matrix number `index` of a parameter, which has so many columns."""
        return cls(zlib.crc32(f"{fqn} {index}".encode()), cols)

    def first(self, span: Span) -> int:
        """The count at the first element of a rectangle."""
        return self.key + span.whole[0].start * self.cols + span.whole[1].start


@dataclass(frozen=True)
class Chunk:
    """Tensors that are updated and rounded together, or some `rows` of a single one that is too large.

    `starts` are the counts of their first elements, less where they begin in `memory`, (3, elements) float32. `wide`,
    `added` and `draws` are its rows, the last as int32, cut into the tensors.
    """

    rows: slice | None
    starts: tuple[int, ...]
    wide: tuple[Tensor, ...]
    added: tuple[Tensor, ...]
    draws: tuple[Tensor, ...]
    memory: Tensor

    def only(self, kept: Sequence[bool]) -> Chunk:
        """The same for some of its tensors."""
        places = [place for place, keep in enumerate(kept) if keep]
        starts = tuple(self.starts[place] for place in places)
        wide, added, draws = (tuple(each[i] for i in places) for each in (self.wide, self.added, self.draws))
        return Chunk(self.rows, starts, wide, added, draws, self.memory)

    def update(self, params: Tensors, updates: Tensors, apply: Callable[[Tensors, Tensors], None], step: int) -> None:
        """Apply updates to parameters in float32, and round the result stochastically, in place."""
        if self.rows is not None:
            params, updates = [params[0][self.rows]], [updates[0][self.rows]]
        torch._foreach_copy_(self.wide, params)
        torch._foreach_copy_(self.added, updates)
        # Over all of the memory, gaps included: one launch each, however many tensors there are.
        wide, added, _ = self.memory.unbind()
        apply([wide], [added])
        # One NaN for all: CUDA's own has all bits set, and a draw would count on from it to zero.
        wide.nan_to_num_(math.nan, math.inf, -math.inf)
        bits, draws, spare = self.memory.view(torch.int32).unbind()
        self._draw(draws, spare, step)
        bits.add_(draws).bitwise_and_(UPPER_HALF)
        torch._foreach_copy_(params, self.wide)

    def _draw(self, draws: Tensor, spare: Tensor, step: int) -> None:
        """Fill `draws` with numbers of 16 bits."""
        first = zlib.crc32(str(step).encode()) >> 2
        torch.arange(first, first + draws.numel(), out=draws, device=draws.device)
        torch._foreach_add_(self.draws, self.starts)
        draws.mul_(_wrapped(FACTORS[0]))
        torch.bitwise_right_shift(draws, 15, out=spare)
        draws.bitwise_xor_(spare).mul_(_wrapped(FACTORS[1]))
        draws.bitwise_right_shift_(16).bitwise_and_(LOWER_HALF)


def chunks(params: Sequence[Tensor], firsts: Sequence[int], scratch: Tensor, most: int) -> Iterator[Chunk]:
    """What updates these tensors in the bytes of `scratch`, of which `most` are used at a time; one row may take more.

    `firsts` are the counts of the tensors' first elements.
    """
    if len(params) > 1 or memory_bytes(params[0]) <= most:
        yield _chunk(None, [param.shape for param in params], firsts, scratch)
        return
    count, cols = params[0].shape
    size = max(1, most // memory_bytes(params[0][:1]))
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        yield _chunk(rows, [torch.Size((rows.stop - start, cols))], [firsts[0] + start * cols], scratch)


def _chunk(rows: slice | None, shapes: Sequence[torch.Size], firsts: Sequence[int], scratch: Tensor) -> Chunk:
    ends = list(accumulate((_aligned(shape.numel()) for shape in shapes), initial=0))
    memory = scratch[: BYTES * ends[-1]].view(torch.float32).view(3, ends[-1])
    starts = tuple(_wrapped(first - place) for first, place in zip(firsts, ends, strict=False))
    wide, added, draws = (
        tuple(flat[place : place + shape.numel()].view(shape) for place, shape in zip(ends, shapes, strict=False))
        for flat in (memory[0], memory[1], memory[1].view(torch.int32))
    )
    return Chunk(rows, starts, wide, added, draws, memory)


def memory_bytes(tensor: Tensor) -> int:
    """Bytes of memory that it takes to update a tensor."""
    return BYTES * _aligned(tensor.numel())


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _wrapped(number: int) -> int:
    """The same number modulo 2**32 as an int32."""
    return (number + 2**31) % 2**32 - 2**31
