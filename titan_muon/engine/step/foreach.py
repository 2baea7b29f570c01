"""What a rank has of a plan, and the foreach calls of its step, with views that are made once."""

# [Note: neighbours]
# - The host takes some microseconds for each tensor of a list, and thousands of experts are pieces of a few parameters.
# - Two matrices of a stack with the same owner are neighbours in the storage and in the buffer. Element-wise work takes
#   them as one piece. Reports, and stages that keep values by matrix, have a piece for each matrix.
# - An owner gets equal pieces from each rank, so their distances in the buffer and in the matrices are equal: between
#   the matrices of a rank, and between the ranks. The rank's own pieces are elsewhere in the buffers.

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage

from ...options import MuonOptions
from ..exchange.agreement import Agreement
from ..exchange.exchange import BufferPiece, Buffers, Exchange
from ..faults.report import FaultReport
from ..layout.intervals import Span
from ..layout.types import Plan
from ..layout.work import ACCELERATOR_BYTES, WIDE_BYTES, chunk_bytes
from ..orthogonalize import Iteration, Method, Methods
from ..program.program import Program
from ..tensors.dtensor import on_device
from ..tensors.storage import Storage, TrainedParam

Tensors = tuple[Tensor, ...] | list[Tensor]


class RoundedChunk(Protocol):
    """Parameters that are updated and rounded together, in `memory`. `firsts`: the count of the first draw of each."""

    @property
    def memory(self) -> Tensor: ...
    @property
    def firsts(self) -> list[int]: ...
    def only(self, kept: Sequence[bool]) -> RoundedChunk: ...
    def update(self, params: Tensors, updates: Tensors, apply: Callable[[Tensors, Tensors], None], step: int) -> None:
        """`apply` changes float32 copies, which are rounded."""


class Rounding(Protocol):
    """Rounding of updated weights that draws a number for each element. `element_bytes`: temporary bytes of one."""

    element_bytes: int

    def applies_to(self, param: Tensor) -> bool: ...
    def first_draw(self, fqn: str, index: int) -> int: ...
    def memory_bytes(self, tensor: Tensor) -> int: ...
    def chunk(self, shapes: Sequence[torch.Size], firsts: Sequence[int], scratch: Tensor) -> RoundedChunk: ...


@dataclass(frozen=True)
class StepContext:
    """What this rank has of a plan: the parts that a step, its decorators and features are made from.

    Attributes:
        params, storage, iterations: by parameter of the plan.
        methods: by work of the plan.
        rounding: of some weights. None: to the nearest number.
    """

    plan: Plan
    program: Program
    params: tuple[TrainedParam, ...]
    storage: tuple[Storage, ...]
    iterations: tuple[Iteration, ...]
    methods: tuple[Method, ...]
    buffers: Buffers
    exchange: Exchange
    report: FaultReport
    agreement: Agreement
    options: MuonOptions
    device: torch.device
    rounding: Rounding | None = None

    def on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.device)

    def rounding_of(self, parameter: int) -> Rounding | None:
        """The rounding of a parameter; None to the nearest number."""
        return self.rounding if self.rounding and self.rounding.applies_to(self.storage[parameter].param) else None

    def numbers(self, numbers: list[int]) -> Tensor:
        """(count,) int64 on the device."""
        return self.on_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def parameters_of(self, bucket: int) -> frozenset[int]:
        """The parameters with a piece on this rank in a bucket."""
        return frozenset(self.plan.matrices[p.matrix].parameter for p in self.program.buckets[bucket].stored)


def methods_of(plan: Plan, iterations: Sequence[Iteration], dispatch: Methods) -> Iterator[Method]:
    """The Newton-Schulz method of each work. `iterations`: by parameter."""
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    for matrix in (first[work] for work in range(len(plan.works))):
        yield dispatch.choose(matrix.rows, matrix.cols, iterations[matrix.parameter].steps)


SLOT_ALIGNMENT = 64
"""Bytes, for different dtypes and vectorized kernels."""
CPU_BYTES = 2**15
"""Limit for several tensors in a call on a CPU: the L1 cache."""


def call_bytes(device: str) -> int:
    """Limit on the wide elements of several tensors in a call."""
    return CPU_BYTES if device == "cpu" else ACCELERATOR_BYTES


class Rectangle(NamedTuple):
    """A rectangle `place` of a parameter's (rows, cols) view; None for the whole view. `matrix`: index in the plan."""

    parameter: int
    place: tuple[slice, slice] | slice | None  # A single slice takes half the time to index.
    matrix: int = -1

    def of(self, stored: Tensor | None) -> Tensor:
        assert stored is not None, "a gradient is released after its last piece is packed"
        return stored if self.place is None else stored[self.place]

    def of_momentum(self, storage: Storage) -> Tensor:
        """The rectangle of the momentum, which may hold only some rows of the parameter, or none."""
        if storage.momentum.size(0) in (storage.param.size(0), 0):
            return self.of(storage.momentum)
        rows, cols = self.place if isinstance(self.place, tuple) else (self.place, slice(None))
        assert rows is not None, "a holder of all rows of a parameter keeps the whole momentum"
        first = storage.first_row
        return storage.momentum[slice(rows.start - first, rows.stop - first, rows.step), cols]

    def in_rows(self, count: int, most: int) -> Iterator[tuple[Rectangle, slice]]:
        """Parts of at most `most` rows, each with its rows in the rectangle."""
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
class MomentumCall:
    """Rectangles whose momentum changes in one call.

    `packed`: views for the input of Newton-Schulz, or empty. `grads`: gradients in the device's memory, if those of the
    step are on the host.
    """

    group: Mapping[str, Any]
    parts: tuple[Rectangle, ...]
    momentum: tuple[Tensor, ...]
    packed: tuple[Tensor, ...]
    grads: tuple[Tensor, ...] = ()

    def split(self, kind: Callable[[Rectangle], K]) -> dict[K, MomentumCall]:
        calls, kinds, names = {}, [kind(part) for part in self.parts], ("parts", "momentum", "packed", "grads")
        for value in dict.fromkeys(kinds):
            calls[value] = replace(self, **_selected(self, names, [k == value for k in kinds]))
        return calls


@dataclass(frozen=True)
class UpdateCall:
    """Rectangles of matrices with one shape, `out_in`, decayed and updated in one call.

    `scratch` takes the updates if the parameters' dtype is wider. `chunk` rounds the parameters. Both are in
    `memory`, which is allocated only during a call, with `scratch_bytes`.
    """

    group: Mapping[str, Any]
    out_in: tuple[int, int]
    parts: tuple[Rectangle, ...]
    params: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    memory: UntypedStorage
    scratch: tuple[Tensor, ...] = ()
    scratch_bytes: int = 0
    chunk: RoundedChunk | None = None

    def with_current_group(self) -> UpdateCall:
        # Clone, because a scheduler changes a tensor learning rate in place.
        kept = {name: value for name, value in self.group.items() if name not in ("params", "param_names")}
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
        return replace(self, group=copied)

    def without(self, parameters: Collection[int]) -> UpdateCall:
        kept = [part.parameter not in parameters for part in self.parts]
        chunk = None if self.chunk is None else self.chunk.only(kept)
        return replace(self, **_selected(self, ("parts", "params", "updates", "scratch"), kept), chunk=chunk)


def without_parameters(calls: Iterable[UpdateCall], parameters: Collection[int]) -> Iterator[UpdateCall]:
    """The calls without these parameters."""
    for call in calls:
        remaining = call.without(parameters) if parameters else call
        if remaining.params:
            yield remaining


class Copies(NamedTuple):
    """Copies in one foreach call."""

    targets: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]


def joined(pieces: Iterable[BufferPiece], kind: Callable[[int], Hashable]) -> list[BufferPiece]:
    """The pieces, with neighbours in the rows of a parameter and in the buffer as one piece of the first matrix.

    `kind`: of a matrix. Only pieces of one kind are joined.
    """
    result: list[BufferPiece] = []
    for piece in pieces:
        both = _both(result[-1], piece) if result and kind(result[-1].matrix) == kind(piece.matrix) else None
        if both is None:
            result.append(piece)
        else:
            result[-1] = both
    return result


def _both(first: BufferPiece, second: BufferPiece) -> BufferPiece | None:
    """One piece of two, or None if they are not neighbours."""
    if len(first.spans) > 1 or len(second.spans) > 1:
        return None
    (rows, cols), (next_rows, next_cols) = first.spans[0].local, second.spans[0].local
    if rows.step or next_rows.step or cols != next_cols or rows.stop != next_rows.start:
        return None
    height, width = next_rows.stop - rows.start, first.spans[0].piece[1].stop
    view = None
    if first.view is not None and second.view is not None:
        if second.view.storage_offset() != first.view.storage_offset() + first.view.numel():
            return None
        view = first.view.as_strided((height, width), (width, 1))
    elif first.view is not None or second.view is not None:
        return None
    start = first.spans[0].whole
    span = Span(
        (slice(rows.start, next_rows.stop), cols),
        (slice(start[0].start, start[0].start + height), start[1]),
        (slice(0, height), slice(0, width)),
    )
    return first._replace(spans=(span,), view=view)


def momentum_calls(pieces: Iterable[BufferPiece], rank: StepContext) -> tuple[MomentumCall, ...]:
    """The momentum calls of these pieces."""
    numbers = group_numbers(rank)
    placed = [
        (part, view, part.of_momentum(rank.storage[part.parameter]))
        for piece in pieces
        for part, view, _ in _rectangles(piece, rank)
    ]
    calls = batched_by_kind(
        placed,
        lambda item: (numbers[item[0].parameter], item[2].dtype, item[1] is None),
        call_bytes(rank.device.type),
        lambda item: WIDE_BYTES * item[2].numel(),
    )
    return tuple(
        MomentumCall(
            rank.params[items[0][0].parameter].group,
            tuple(part for part, _, _ in items),
            tuple(momentum for _, _, momentum in items),
            tuple(view for _, view, _ in items if view is not None),
        )
        for items in calls
    )


def update_calls(pieces: Iterable[BufferPiece], rank: StepContext, scratch: Tensor) -> tuple[UpdateCall, ...]:
    """The update calls of these pieces. `scratch`: memory of all calls."""
    numbers, out_in = group_numbers(rank), rank.plan.out_in
    roundings = [rank.rounding_of(parameter) for parameter in range(len(rank.storage))]
    placed = [
        (part, view, part.of(rank.storage[part.parameter].param), first)
        for piece in pieces
        for part, view, first in _rectangles(piece, rank, roundings)
    ]
    calls = batched_by_kind(
        placed,
        lambda item: (numbers[item[0].parameter], out_in(item[0].matrix), item[2].dtype),
        call_bytes(rank.device.type),
        lambda item: _bytes_in_call(item[2], roundings[item[0].parameter]),
    )
    return tuple(_update_call(rank, items, scratch, roundings[items[0][0].parameter]) for items in calls)


def scratch_bytes(rank: StepContext) -> int:
    """Bytes of `scratch` for any call."""
    row_bytes = [_bytes_in_call(s.param[:1], rank.rounding_of(number)) for number, s in enumerate(rank.storage)]
    return max(call_bytes(rank.device.type), chunk_bytes(rank.device.type), *row_bytes)


def _bytes_in_call(tensor: Tensor, rounding: Rounding | None) -> int:
    return slot_bytes(tensor) if rounding is None else rounding.memory_bytes(tensor)


def _rectangles(
    piece: BufferPiece, rank: StepContext, roundings: Sequence[Rounding | None] | None = None
) -> Iterator[tuple[Rectangle, Tensor | None, int]]:
    """Cuts a piece into rectangles of at most `chunk_bytes`, each with its part of the view and its first draw.

    `roundings`: of an update, by parameter; None for a change of the momentum.
    """
    matrix = rank.plan.matrices[piece.matrix]
    param, rounding = rank.storage[matrix.parameter].param, roundings[matrix.parameter] if roundings else None
    element_bytes, key = WIDE_BYTES if roundings is None else param.element_size(), 0
    if rounding is not None:
        element_bytes = rounding.element_bytes
        key = rounding.first_draw(rank.plan.parameters[matrix.parameter].fqn, matrix.index)
    # Rectangles with the same rows get the same height.
    most = max(1, (chunk_bytes(rank.device.type) // element_bytes - SLOT_ALIGNMENT) // max(1, param.size(1)))
    for span in piece.spans:
        whole = rectangle_of(matrix.parameter, span, param)._replace(matrix=piece.matrix)
        view = None if piece.view is None else piece.view[span.piece]
        first = key + span.whole[0].start * matrix.cols + span.whole[1].start
        height, width = (side.stop - side.start for side in span.piece)
        for part, rows in whole.in_rows(height, most):
            yield part, None if view is None else view[rows], first + (rows.start or 0) * width


def _update_call(
    rank: StepContext,
    items: Sequence[tuple[Rectangle, Tensor | None, Tensor, int]],
    scratch: Tensor,
    rounding: Rounding | None,
) -> UpdateCall:
    parts, views, params, firsts = zip(*items, strict=True)
    updates = tuple(view for view in views if view is not None)
    assert len(updates) == len(params), "every stored piece is returned"
    group, out_in = rank.params[parts[0].parameter].group, rank.plan.out_in(parts[0].matrix)
    call = UpdateCall(group, out_in, parts, params, updates, scratch.untyped_storage())
    if rounding is not None:
        chunk = rounding.chunk([param.shape for param in params], firsts, scratch)
        return replace(call, scratch_bytes=chunk.memory.nbytes, chunk=chunk)
    dtype, update_dtype = params[0].dtype, updates[0].dtype
    # Wider updates need no conversion: the sum is rounded once.
    widens = dtype != update_dtype and torch.promote_types(dtype, update_dtype) == dtype
    wide = tuple(carved(scratch, params)) if widens else ()
    return replace(call, scratch=wide, scratch_bytes=sum(map(slot_bytes, wide)))


def slot_bytes(tensor: Tensor) -> int:
    """Bytes with alignment."""
    return -(-tensor.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def carved(slot: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of a slot with the shapes and dtypes of the tensors."""
    start = 0
    for tensor in tensors:
        yield slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += slot_bytes(tensor)


def group_numbers(rank: StepContext) -> list[int]:
    """A number for the group of each parameter. Parameters of one group are neighbours."""
    # By identity, because a scheduler may change hyperparameters.
    numbers: list[int] = []
    for before, group in pairwise((None, *(trained.group for trained in rank.params))):
        last = numbers[-1] if numbers else -1
        numbers.append(last if group is before else last + 1)
    return numbers


T = TypeVar("T")


def batched_by_kind(
    items: Iterable[T], kind: Callable[[T], Hashable], limit: float, bytes_of: Callable[[T], int]
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


def _selected(call: MomentumCall | UpdateCall, names: Iterable[str], kept: Sequence[bool]) -> dict[str, Any]:
    """Each named field, without the entries where `kept` is false. An empty field stays empty."""
    return {name: tuple(compress(getattr(call, name), kept)) for name in names}
