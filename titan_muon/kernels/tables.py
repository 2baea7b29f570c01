"""Static tables of the pieces of a launch, and the vector of all that changes between steps."""

# [Note: tables and the vector of a step]
# - One launch takes all pieces of a bucket. A program finds its piece in a table, made once: elements, columns and
#   strides, and each tensor as a base and an offset. `tiles` names the row of each program.
# - A base is a word of the vector: the address of a gradient, which is a new tensor in each step, or of a storage, as
#   buffers move between steps. The vector also has rates, seeds and flags. One copy fills it before the first launch.
# - So no argument of a kernel changes between steps, and no table is made in a step.

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from .draws import wrapped

BLOCK = 2048
"""Elements of a program."""
MOST = 2**30
"""Most elements of a row, because programs count in 32 bits. A larger piece has several rows."""
MISSING, EXCLUDED = 1, 2
"""Flags of a parameter: no gradient, so that the momentum stays and matrices get no update; the weight stays."""
ALIGNMENT = 16
"""Elements, and bytes of an address, for accesses of 16 bytes at once."""


class ViewPlace(NamedTuple):
    """A (rows, cols) view of a tensor. `base`: word of the vector. `offset`: in bytes. `down`, `across`: strides."""

    base: int
    offset: int
    down: int
    across: int
    itemsize: int

    @classmethod
    def of(cls, base: int, view: Tensor, first: int, itemsize: int) -> ViewPlace:
        """The place of a view, which begins `first` elements after the base."""
        return cls(base, first * itemsize, view.stride(0), view.stride(1), itemsize)


class Row(NamedTuple):
    """A piece. `numbers`, `flag`: words of the vector. `first`: count of the first draw. `places`: by tensor."""

    rows: int
    cols: int
    numbers: int
    flag: int
    first: int
    places: tuple[ViewPlace, ...]

    @property
    def flat(self) -> bool:
        return all((place.down, place.across) == (self.cols, 1) for place in self.places)

    @property
    def aligned(self) -> bool:
        """Whether 16 elements are adjacent and aligned everywhere, if all bases are aligned."""
        numbers = [self.rows * self.cols] if self.flat else [self.cols, *(place.down for place in self.places)]
        numbers += [place.offset for place in self.places]
        return all(p.across == 1 for p in self.places) and all(number % ALIGNMENT == 0 for number in numbers)

    def cut(self) -> Iterator[Row]:
        """Rows of at most MOST elements, or a single line of elements."""
        height = max(1, MOST // max(1, self.cols))
        for start in range(0, self.rows, height):
            places = tuple(p._replace(offset=p.offset + start * p.down * p.itemsize) for p in self.places)
            rows, first = min(height, self.rows - start), self.first + start * self.cols
            yield self._replace(rows=rows, first=first, places=places)

    def words(self, program: int) -> tuple[int, ...]:
        """The row of a table. `program`: the first."""
        head = self.rows * self.cols, self.cols, program, self.numbers, self.flag, wrapped(self.first)
        return *head, *(word for place in self.places for word in place[:4])


class Table(NamedTuple):
    """The pieces of a launch.

    Attributes:
        tiles: (programs,) int32, row of each program.
        rows: (rows, words) int64.
        bases: words of the vector with addresses.
        flat: whether all tensors are contiguous.
        aligned: whether 16 elements are adjacent and aligned everywhere, if all bases are aligned.
    """

    tiles: Tensor
    rows: Tensor
    bases: tuple[int, ...]
    flat: bool
    aligned: bool

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Table:
        parts = [part for row in rows if row.rows * row.cols for part in row.cut()]
        counts = torch.tensor([-(-part.rows * part.cols // BLOCK) for part in parts], dtype=torch.int64, device="cpu")
        programs = (counts.cumsum(0) - counts).tolist()
        words = [part.words(program) for part, program in zip(parts, programs, strict=True)]
        tiles = torch.repeat_interleave(torch.arange(len(parts), device="cpu"), counts).int()
        bases = tuple(sorted({place.base for part in parts for place in part.places}))
        flat, aligned = all(part.flat for part in parts), all(part.aligned for part in parts)
        return cls(tiles, torch.tensor(words, dtype=torch.int64, device="cpu"), bases, flat, aligned)

    def on(self, send: Callable[[Tensor], Tensor]) -> Table:
        """The table on a device."""
        return self._replace(tiles=send(self.tiles), rows=send(self.rows))


def address(memory: Tensor | UntypedStorage) -> int:
    """The address of a tensor or storage on the device."""
    return memory.data_ptr()


def bits(number: float) -> int:
    """The bits of a float32, as a kernel's arguments are rounded."""
    word: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return word
