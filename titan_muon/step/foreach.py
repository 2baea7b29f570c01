"""The foreach calls of a step on this rank's storage, with views that are made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..plan.terms.layout import Span
from ..state.host import ALIGNMENT, carved, slot_bytes
from ..tensors.storage import STEP, Storage
from .rounding import BYTES, Chunk, Draws, chunk_of, memory_bytes
from .rule import Rule
from .update import Tensors, lr_scale

ACCELERATOR_BYTES = 2**25
"""Limit on the wide elements of a call, which may allocate as much memory."""
CPU_BYTES = 2**15
"""The limit for several tensors in a call on a CPU: the L1 cache."""
CPU_CHUNK_BYTES = 2**20
"""The limit for a large tensor in a call on a CPU. Smaller chunks have more overhead."""


def call_bytes(device: str) -> int:
    """Limit on the wide elements of several tensors in a call."""
    return CPU_BYTES if device == "cpu" else ACCELERATOR_BYTES


def chunk_bytes(device: str) -> int:
    """Limit on the wide elements of one tensor in a call. Larger tensors are cut into rows."""
    return CPU_CHUNK_BYTES if device == "cpu" else ACCELERATOR_BYTES


WIDE_BYTES = 4
"""Bytes of an element in the arithmetic of the momentum."""


class Rectangle(NamedTuple):
    """A rectangle `place` of a parameter's (rows, cols) view; None for the whole view. `matrix`: index in the plan."""

    # One slice for whole rows takes half the time to index.
    parameter: int
    place: tuple[slice, slice] | slice | None
    matrix: int = -1

    def of(self, stored: Tensor | None) -> Tensor:
        """The rectangle of a tensor with the storage layout of the parameter."""
        assert stored is not None, "a gradient is released after its last piece is packed"
        return stored if self.place is None else stored[self.place]

    def of_average(self, storage: Storage) -> Tensor:
        """The rectangle of the momentum, which may hold only a row range of the parameter."""
        if storage.average.size(0) == storage.param.size(0):
            return self.of(storage.average)
        rows, cols = self.place if isinstance(self.place, tuple) else (self.place, slice(None))
        assert rows is not None, "a holder of all rows of a parameter keeps the whole momentum"
        first = storage.first_row
        return storage.average[slice(rows.start - first, rows.stop - first, rows.step), cols]

    def in_rows(self, count: int, most: int) -> Iterator[tuple[Rectangle, slice]]:
        """The rectangle of `count` rows in parts of at most `most` rows, each with its rows in the rectangle."""
        if count <= most:
            yield self, slice(None)
            return
        rows, cols = self.place if isinstance(self.place, tuple) else (self.place or slice(0, count), None)
        step = rows.step or 1
        for start in range(0, count, most):
            stop = min(start + most, count)
            part = slice(rows.start + start * step, min(rows.start + stop * step, rows.stop), rows.step)
            yield self._replace(place=part if cols is None else (part, cols)), slice(start, stop)

    @property
    def rows(self) -> Rectangle:
        return self._replace(place=self.place[0]) if isinstance(self.place, tuple) else self

    @property
    def start(self) -> int:
        place = self.rows.place
        return place.start if isinstance(place, slice) else 0


def rectangle_of(parameter: int, span: Span, stored: Tensor) -> Rectangle:
    """The rectangle of a span in (rows, cols) storage."""
    rows, cols = span.local
    # With steps, because interleaved matrices span all rows.
    if cols != slice(0, stored.size(1)):
        return Rectangle(parameter, span.local)
    return Rectangle(parameter, None if rows == slice(0, stored.size(0)) else rows)


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Advance:
    """Rectangles whose momentum advances in one call. `packed`: views for the input of Newton-Schulz, or empty."""

    group: Mapping[str, Any]
    parts: tuple[Rectangle, ...]
    averages: tuple[Tensor, ...]
    packed: tuple[Tensor, ...]

    def split(self, kind: Callable[[Rectangle], K]) -> dict[K, Advance]:
        """A call for the parts of each kind."""
        kinds = [kind(part) for part in self.parts]
        return {value: self._select([k == value for k in kinds]) for value in dict.fromkeys(kinds)}

    def _select(self, kept: Sequence[bool]) -> Advance:
        averages, packed = _selected(self.averages, kept), _selected(self.packed, kept)
        return Advance(self.group, _selected(self.parts, kept), averages, packed)


@dataclass(frozen=True)
class Apply:
    """Rectangles of matrices with one shape, `out_in`, decayed and updated in one call.

    `scratch` takes the updates if the parameters' dtype is wider. `chunk` rounds parameters stochastically.
    """

    group: Mapping[str, Any]
    out_in: tuple[int, int]
    parts: tuple[Rectangle, ...]
    params: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]
    scratch_bytes: int
    chunk: Chunk | None = None

    def update(self, params: Tensors, rule: Rule) -> None:
        scale = lr_scale(self.group["lr_scale"], *self.out_in)
        if self.chunk is None:
            rule.apply(params, self.updates, self.group, scale, self.scratch)
        else:
            apply = partial(rule.apply, group=self.group, scale=scale)
            self.chunk.update(params, self.updates, apply, self.group[STEP])

    def with_current_group(self) -> Apply:
        """The call with a copy of the current hyperparameters."""
        # Clone tensors, because a scheduler changes a tensor learning rate in place.
        kept = {name: value for name, value in self.group.items() if name not in ("params", "param_names")}
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
        return replace(self, group=copied)

    def without(self, parameters: Collection[int]) -> Apply:
        kept = [part.parameter not in parameters for part in self.parts]
        params, updates, scratch = (_selected(views, kept) for views in (self.params, self.updates, self.scratch))
        parts, chunk = _selected(self.parts, kept), None if self.chunk is None else self.chunk.only(kept)
        return Apply(self.group, self.out_in, parts, params, updates, scratch, self.scratch_bytes, chunk)


def without_parameters(calls: Iterable[Apply], parameters: Collection[int]) -> Iterator[Apply]:
    """The calls without these parameters. Skips empty calls."""
    for call in calls:
        remaining = call.without(parameters) if parameters else call
        if remaining.params:
            yield remaining


@dataclass(frozen=True)
class Copies:
    """Tensor copies in one foreach call."""

    targets: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Copies:
        listed = tuple(pairs)
        return cls(tuple(target for target, _ in listed), tuple(source for _, source in listed))

    def run(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


class StoredPiece(NamedTuple):
    """A piece of a matrix on this rank: rectangles `spans` of the parameter, and a tensor `view`.

    `out_in`: outputs and inputs of the whole matrix. `draws`: see [Note: draws].
    """

    matrix: int
    parameter: int
    out_in: tuple[int, int]
    spans: tuple[Span, ...]
    view: Tensor | None
    draws: Draws


def advances(
    pieces: Iterable[StoredPiece], groups: Sequence[Mapping[str, Any]], storage: Sequence[Storage], device: str
) -> tuple[Advance, ...]:
    """The advance calls of these pieces, packed into `view`. `groups` and `storage` are by parameter."""
    placed = []
    for piece in pieces:
        stored = storage[piece.parameter]
        most = _rows_within(device, WIDE_BYTES, stored)
        for span in piece.spans:
            whole = rectangle_of(piece.parameter, span, stored.param)._replace(matrix=piece.matrix)
            view = None if piece.view is None else piece.view[span.piece]
            for part, rows in whole.in_rows(_height(span), most):
                placed.append((part, part.of_average(stored), () if view is None else (view[rows],)))
    # By identity, because a scheduler may change hyperparameters.
    numbers = _numbered(groups)
    calls = _grouped(
        placed,
        lambda item: (numbers[item[0].parameter], item[1].dtype, len(item[2])),
        call_bytes(device),
        lambda i: WIDE_BYTES * i[1].numel(),
    )
    return tuple(
        Advance(
            groups[items[0][0].parameter],
            tuple(part for part, _, _ in items),
            tuple(average for _, average, _ in items),
            tuple(view for _, _, packed in items for view in packed),
        )
        for items in calls
    )


def applies(
    pieces: Iterable[StoredPiece],
    groups: Sequence[Mapping[str, Any]],
    storage: Sequence[Storage],
    device: str,
    scratch: Tensor,
    *,
    stochastic: bool,
) -> tuple[Apply, ...]:
    """The apply calls of these pieces; `view` is a piece of an orthogonalized matrix.

    All calls share the `scratch_bytes` of `scratch`. `stochastic`: round bfloat16 parameters stochastically.
    """
    draws = [stochastic and stored.param.dtype == torch.bfloat16 for stored in storage]
    placed = []
    for piece in pieces:
        assert piece.view is not None, "every stored piece is returned"
        stored = storage[piece.parameter]
        most = _rows_within(device, BYTES if draws[piece.parameter] else stored.param.element_size(), stored)
        for span in piece.spans:
            whole, view, first = (
                rectangle_of(piece.parameter, span, stored.param)._replace(matrix=piece.matrix),
                piece.view[span.piece],
                piece.draws.first(span),
            )
            for part, rows in whole.in_rows(_height(span), most):
                place = (part, piece.out_in, first + (rows.start or 0) * view.size(1))
                placed.append((place, part.of(stored.param), view[rows]))
    numbers = _numbered(groups)

    def size(item: Placed) -> int:
        return memory_bytes(item[1]) if draws[item[0][0].parameter] else slot_bytes(item[1])

    calls = _grouped(
        placed, lambda item: (numbers[item[0][0].parameter], item[0][1], item[1].dtype), call_bytes(device), size
    )
    return tuple(
        _stochastic_apply(groups, items, scratch) if draws[items[0][0][0].parameter] else _apply(groups, items, scratch)
        for items in calls
    )


def scratch_bytes(storage: Sequence[Storage], device: str) -> int:
    """Scratch bytes for any Apply."""
    return max([call_bytes(device), chunk_bytes(device), *(memory_bytes(stored.param[:1]) for stored in storage)])


def _rows_within(device: str, element_bytes: int, storage: Storage) -> int:
    """Rows of a chunk, at least one; equal for rectangles side by side."""
    # Less the padding of tensors in the scratch.
    return max(1, (chunk_bytes(device) // element_bytes - ALIGNMENT) // max(1, storage.param.size(1)))


def _height(span: Span) -> int:
    rows = span.piece[0]
    return rows.stop - rows.start


Placed = tuple[tuple[Rectangle, tuple[int, int], int], Tensor, Tensor]
"""(rectangle, `out_in` of the matrix, count of the first draw), view of the parameter, view of the update."""


def _stochastic_apply(groups: Sequence[Mapping[str, Any]], items: Sequence[Placed], scratch: Tensor) -> Apply:
    places, params, updates = zip(*items, strict=True)
    chunk = chunk_of([param.shape for param in params], [first for *_, first in places], scratch)
    parts, out_in = tuple(part for part, *_ in places), places[0][1]
    return Apply(groups[parts[0].parameter], out_in, parts, params, updates, (), chunk.memory.nbytes, chunk)


def _apply(groups: Sequence[Mapping[str, Any]], items: Sequence[Placed], scratch: Tensor) -> Apply:
    places, params, updates = zip(*items, strict=True)
    dtype, update_dtype = params[0].dtype, updates[0].dtype
    # Wider updates need no conversion: the sum is rounded once.
    widens = dtype != update_dtype and torch.promote_types(dtype, update_dtype) == dtype
    wide = tuple(carved(scratch, params)) if widens else ()
    parts, out_in = tuple(part for part, *_ in places), places[0][1]
    return Apply(groups[parts[0].parameter], out_in, parts, params, updates, wide, sum(map(slot_bytes, wide)))


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    numbers: list[int] = []
    for before, group in pairwise((None, *groups)):
        last = numbers[-1] if numbers else -1
        numbers.append(last if group is before else last + 1)
    return numbers


T = TypeVar("T", bound=tuple[Any, Tensor, Any])


def _grouped(
    items: Iterable[T], kind: Callable[[T], Hashable], limit: int, bytes_of: Callable[[T], int]
) -> Iterator[list[T]]:
    """Lists of items of one kind, of at most `limit` bytes or a single item."""
    waiting: dict[Hashable, list[T]] = {}
    sizes: dict[Hashable, int] = {}
    for item in items:
        key, size = kind(item), bytes_of(item)
        if key in waiting and sizes[key] + size > limit:
            yield waiting.pop(key)
        sizes[key] = size + (sizes[key] if key in waiting else 0)
        waiting.setdefault(key, []).append(item)
    yield from waiting.values()


V = TypeVar("V")


def _selected(values: Sequence[V], kept: Sequence[bool]) -> tuple[V, ...]:
    return tuple(value for value, keep in zip(values, kept, strict=False) if keep)
