"""The foreach calls of a step on the storage of this rank, on views that are made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..plan.terms.layout import Span
from ..state.host import carved, slot_bytes
from ..tensors.storage import STEP, Storage
from .rounding import Chunk, Draws, chunks, memory_bytes
from .rule import Rule
from .update import Tensors, lr_scale

ACCELERATOR_BYTES = 2**25
"""Most bytes of a parameter that one call processes. A call may allocate as many."""
CPU_BYTES = 2**15
"""The same on a CPU, so that its nearest cache still has the bytes for the next operation."""


def call_bytes(device: str) -> int:
    """Most bytes of a parameter that one call processes on a type of device."""
    return CPU_BYTES if device == "cpu" else ACCELERATOR_BYTES


class Rectangle(NamedTuple):
    """A rectangle of a parameter's storage: `place` in its (rows, cols) view, None for all of it."""

    # Only rows, where columns are whole: every step makes the view of a gradient, and this view takes half the time.
    parameter: int
    place: tuple[slice, slice] | slice | None

    def of(self, stored: Tensor | None) -> Tensor:
        """The rectangle of a tensor with the storage layout of the parameter."""
        assert stored is not None, "a gradient is released after its last piece is packed"
        return stored if self.place is None else stored[self.place]

    def of_average(self, storage: Storage) -> Tensor:
        """The rectangle of the momentum, which may have only some rows of the parameter."""
        if storage.average.size(0) == storage.param.size(0):
            return self.of(storage.average)
        rows, cols = self.place if isinstance(self.place, tuple) else (self.place, slice(None))
        assert rows is not None, "what has all rows of a parameter has all of its momentum"
        first = storage.first_row
        return storage.average[slice(rows.start - first, rows.stop - first, rows.step), cols]

    @property
    def rows(self) -> Rectangle:
        """The whole rows of the rectangle."""
        return self._replace(place=self.place[0]) if isinstance(self.place, tuple) else self

    @property
    def start(self) -> int:
        """The first row."""
        place = self.rows.place
        return place.start if isinstance(place, slice) else 0


def rectangle_of(parameter: int, span: Span, stored: Tensor) -> Rectangle:
    """The part of a parameter, stored as a (rows, cols) tensor, for a span."""
    rows, cols = span.local
    # Compare with steps: an interleaved matrix may reach from the first row to the last.
    if cols != slice(0, stored.size(1)):
        return Rectangle(parameter, span.local)
    return Rectangle(parameter, None if rows == slice(0, stored.size(0)) else rows)


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Advance:
    """Parts whose momentum advances in one call. `packed` take the input of Newton-Schulz, if this rank packs it."""

    group: Mapping[str, Any]
    parts: tuple[Rectangle, ...]
    averages: tuple[Tensor, ...]
    packed: tuple[Tensor, ...]

    def split(self, kind: Callable[[Rectangle], K]) -> dict[K, Advance]:
        """The same for the parts of each kind."""
        kinds = [kind(part) for part in self.parts]
        return {each: self._only([found == each for found in kinds]) for each in dict.fromkeys(kinds)}

    def _only(self, kept: Sequence[bool]) -> Advance:
        averages, packed = _those(self.averages, kept), _those(self.packed, kept)
        return Advance(self.group, _those(self.parts, kept), averages, packed)


@dataclass(frozen=True)
class Apply:
    """Parts of matrices of one shape, `out_in`, decayed and updated in one call.

    `scratch` takes the updates in the dtype of the parameters, where that is a wider one; it needs `scratch_bytes`. So
    do `chunks`, which update parameters that are rounded stochastically.
    """

    group: Mapping[str, Any]
    out_in: tuple[int, int]
    parts: tuple[Rectangle, ...]
    params: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]
    scratch_bytes: int
    chunks: tuple[Chunk, ...] = ()

    def update(self, params: Tensors, rule: Rule) -> None:
        """Decay and update these parts of parameters."""
        scale = lr_scale(self.group["lr_scale"], *self.out_in)
        if not self.chunks:
            rule.apply(params, self.updates, self.group, scale, self.scratch)
        for chunk in self.chunks:
            chunk.update(params, self.updates, partial(rule.apply, group=self.group, scale=scale), self.group[STEP])

    def of_now(self) -> Apply:
        """The same call with a copy of the current hyperparameters."""
        # A scheduler changes a learning rate in a tensor in place.
        kept = {name: value for name, value in self.group.items() if name not in ("params", "param_names")}
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
        return replace(self, group=copied)

    def without(self, parameters: Collection[int]) -> Apply:
        """The same call without these parameters."""
        kept = [part.parameter not in parameters for part in self.parts]
        params, updates, scratch = (_those(each, kept) for each in (self.params, self.updates, self.scratch))
        parts, chunks = _those(self.parts, kept), tuple(chunk.only(kept) for chunk in self.chunks)
        return Apply(self.group, self.out_in, parts, params, updates, scratch, self.scratch_bytes, chunks)


def but_for(chosen: Iterable[Apply], parameters: Collection[int]) -> Iterator[Apply]:
    """The calls without some parameters."""
    for each in chosen:
        run = each.without(parameters) if parameters else each
        if run.params:
            yield run


@dataclass(frozen=True)
class Copies:
    """Copies in one call."""

    targets: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Copies:
        """From (target, source) pairs."""
        listed = tuple(pairs)
        return cls(tuple(target for target, _ in listed), tuple(source for _, source in listed))

    def run(self) -> None:
        """Run the copies."""
        # PyTorch refuses a call without tensors.
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


class StoredPiece(NamedTuple):
    """Where a piece of a matrix is on this rank: the rectangles of its parameter, and the piece itself as a tensor.

    `out_in`: outputs and inputs of the matrix, which its learning rate goes by. `draws`: what its elements draw.
    """

    parameter: int
    out_in: tuple[int, int]
    spans: tuple[Span, ...]
    view: Tensor | None
    draws: Draws


def advances(
    pieces: Iterable[StoredPiece], groups: Sequence[Mapping[str, Any]], storage: Sequence[Storage], most: int
) -> tuple[Advance, ...]:
    """The advance calls of these pieces, packed into `view`. `groups` and `storage` are by parameter."""
    found = []
    for piece in pieces:
        stored = storage[piece.parameter]
        for span in piece.spans:
            part = rectangle_of(piece.parameter, span, stored.param)
            packed = () if piece.view is None else (piece.view[span.piece],)
            found.append((part, part.of_average(stored), packed))
    # By the identity of the group, because a scheduler may change its numbers between steps.
    numbers = _numbered(groups)
    alike = _grouped(
        found, lambda item: (numbers[item[0].parameter], item[1].dtype, len(item[2])), most, lambda i: slot_bytes(i[1])
    )
    return tuple(
        Advance(
            groups[items[0][0].parameter],
            tuple(part for part, _, _ in items),
            tuple(average for _, average, _ in items),
            tuple(view for _, _, packed in items for view in packed),
        )
        for items in alike
    )


def applies(
    pieces: Iterable[StoredPiece],
    groups: Sequence[Mapping[str, Any]],
    storage: Sequence[Storage],
    most: int,
    scratch: Tensor,
    *,
    stochastic: bool,
) -> tuple[Apply, ...]:
    """The apply calls of these pieces; `view` is a piece of an orthogonalized matrix.

    All take turns in the bytes of `scratch`, which has `scratch_bytes` of them. `stochastic`: whether parameters in
    bfloat16 are rounded so.
    """
    found = []
    for piece in pieces:
        assert piece.view is not None, "every piece that is stored comes back"
        stored = storage[piece.parameter].param
        for span in piece.spans:
            part = rectangle_of(piece.parameter, span, stored)
            found.append(((part, piece.out_in, piece.draws.first(span)), part.of(stored), piece.view[span.piece]))
    numbers = _numbered(groups)
    draw = [stochastic and each.param.dtype == torch.bfloat16 for each in storage]

    def taken(item: Placed) -> int:
        return memory_bytes(item[1]) if draw[item[0][0].parameter] else slot_bytes(item[1])

    alike = _grouped(found, lambda item: (numbers[item[0][0].parameter], item[0][1], item[1].dtype), most, taken)
    return tuple(
        _drawn(groups, items, scratch, most) if draw[items[0][0][0].parameter] else _apply(groups, items, scratch)
        for items in alike
    )


def scratch_bytes(storage: Sequence[Storage], most: int) -> int:
    """Most bytes of scratch of any Apply: `most`, or the bytes of the largest parameter or the longest row."""
    needed = [max(slot_bytes(each.param), memory_bytes(each.param[:1])) for each in storage]
    return max([most, *needed])


Placed = tuple[tuple[Rectangle, tuple[int, int], int], Tensor, Tensor]
"""A part with the outputs and inputs of its matrix and the count of its first draw, and it in the parameter and in the
orthogonalized matrix."""


def _drawn(groups: Sequence[Mapping[str, Any]], items: Sequence[Placed], scratch: Tensor, most: int) -> Apply:
    places, params, updates = zip(*items, strict=True)
    made = tuple(chunks(params, [first for *_, first in places], scratch, most))
    parts, out_in = tuple(part for part, *_ in places), places[0][1]
    most_bytes = max(chunk.memory.nbytes for chunk in made)
    return Apply(groups[parts[0].parameter], out_in, parts, params, updates, (), most_bytes, made)


def _apply(groups: Sequence[Mapping[str, Any]], items: Sequence[Placed], scratch: Tensor) -> Apply:
    places, params, updates = zip(*items, strict=True)
    dtype, other = params[0].dtype, updates[0].dtype
    # Updates of a wider dtype than the parameter's are rounded once, with the sum.
    widens = dtype != other and torch.promote_types(dtype, other) == dtype
    wide = tuple(carved(scratch, params)) if widens else ()
    parts, out_in = tuple(part for part, *_ in places), places[0][1]
    return Apply(groups[parts[0].parameter], out_in, parts, params, updates, wide, sum(map(slot_bytes, wide)))


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """A number for each parameter: the number of its group. Groups with equal values have different numbers."""
    numbers: list[int] = []
    for before, group in pairwise((None, *groups)):
        last = numbers[-1] if numbers else -1
        numbers.append(last if group is before else last + 1)
    return numbers


T = TypeVar("T", bound=tuple[Any, Tensor, Any])


def _grouped(
    items: Iterable[T], kind: Callable[[T], Hashable], most: int, taken: Callable[[T], int]
) -> Iterator[list[T]]:
    """Items of one kind, in lists that take at most `most` bytes, or of one item."""
    waiting: dict[Hashable, list[T]] = {}
    held: dict[Hashable, int] = {}
    for item in items:
        key, size = kind(item), taken(item)
        if key in waiting and held[key] + size > most:
            yield waiting.pop(key)
        held[key] = size + (held[key] if key in waiting else 0)
        waiting.setdefault(key, []).append(item)
    yield from waiting.values()


V = TypeVar("V")


def _those(values: Sequence[V], kept: Sequence[bool]) -> tuple[V, ...]:
    """The kept values; empty if there are no values."""
    return tuple(value for value, keep in zip(values, kept, strict=False) if keep)
