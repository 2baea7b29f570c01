"""The part of each matrix stored by each rank: interval arithmetic over shapes, meshes and placements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod

from .types import Cut, Interval, Layout, MatrixStack, Parameter, Piece, Segment, Separate, Shard

Intervals = tuple[Interval, ...]


def chunk(length: int, count: int, index: int) -> Interval:
    """Part `index` of `count` parts like torch.chunk; the last parts are short or empty."""
    step = -(-length // count)
    return Interval(min(length, index * step), min(length, (index + 1) * step))


def merged(intervals: Iterable[Interval]) -> Intervals:
    """Join touching intervals and drop empty intervals."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1].stop == start:
            joined[-1] = Interval(joined[-1].start, stop)
        else:
            joined.append(Interval(start, stop))
    return tuple(joined)


def select(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Indices number `start` to `stop` of the listed indices."""
    selected, seen = [], 0
    for interval in intervals:
        low, high = max(start - seen, 0), min(stop - seen, interval.stop - interval.start)
        if low < high:
            selected.append(Interval(interval.start + low, interval.start + high))
        seen += interval.stop - interval.start
    return tuple(selected)


def shard(intervals: Intervals, placement: Cut, count: int, index: int) -> Intervals:
    """The indices kept by rank `index` of `count` on a mesh axis, from the indices left by earlier axes."""
    # Axis after axis, like DTensor: a single cut of 10 rows into 4 x 2 parts would give different parts.
    length = sum(stop - start for start, stop in intervals)
    if isinstance(placement, Shard):
        return select(intervals, *chunk(length, count, index))
    kept: list[Interval] = []
    for part in range(placement.split_factor):
        outer = chunk(length, placement.split_factor, part)
        inner = chunk(outer.stop - outer.start, count, index)
        kept += select(intervals, outer.start + inner.start, outer.start + inner.stop)
    return merged(kept)


def region(layout: Layout, coordinate: Sequence[int]) -> tuple[Intervals, ...]:
    """The indices stored at a mesh coordinate, by dim."""
    dims: list[Intervals] = [merged([Interval(0, size)]) for size in layout.shape]
    for placement, count, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        if isinstance(placement, Cut) and not (layout.rows and placement.dim == 0):
            dims[placement.dim] = shard(dims[placement.dim], placement, count, index)
    if layout.rows:
        dims[0] = merged([layout.rows[layout.mesh.position(coordinate)]])
    return tuple(dims)


def check_rows(layout: Layout) -> None:
    """Raise ValueError unless the ranks of each replica have every row of the layout once."""
    replicas: dict[tuple[int, ...], list[Interval]] = {}
    for rows, coordinate in zip(layout.rows, layout.mesh.coordinates.values(), strict=True):
        placed = zip(layout.placements, coordinate, strict=True)
        replica = tuple(index for placement, index in placed if not (isinstance(placement, Cut) and placement.dim == 0))
        replicas.setdefault(replica, []).append(rows)
    for ranges in replicas.values():
        if merged(sorted(ranges)) != merged([Interval(0, layout.shape[0])]):
            listed = ", ".join(f"{start}:{stop}" for start, stop in ranges)
            raise ValueError(f"its ranks store rows {listed}, which are not all {layout.shape[0]} rows once")


def flattened(dims: Sequence[Intervals], sizes: Sequence[int]) -> Intervals:
    """Indices into the flattened dim."""
    flat: Intervals = (Interval(0, 1),)
    inner = 1
    for intervals, size in zip(reversed(dims), reversed(sizes), strict=True):
        # Otherwise (tensor parallelism within each expert) go row by row.
        if flat == (Interval(0, inner),):
            flat = merged(Interval(start * inner, stop * inner) for start, stop in intervals)
        else:
            flat = merged(
                Interval(i * inner + low, i * inner + high)
                for start, stop in intervals
                for i in range(start, stop)
                for low, high in flat
            )
        inner *= size
    return flat


class Stored:
    """Indices that a rank stores along a side: intervals, with starts and storage offsets."""

    def __init__(self, intervals: Intervals) -> None:
        self.intervals, self.starts = intervals, [start for start, _ in intervals]
        self.offsets = list(accumulate((stop - start for start, stop in intervals), initial=0))


def intersect(held: Stored, wanted: Intervals, step: int = 1) -> tuple[Segment, ...]:
    """Segments of the storage with every `step`-th wanted index of each interval."""
    stored, segments, whole = held.intervals, [], 0
    for low, high in wanted:
        for i in range(max(0, bisect_right(held.starts, low) - 1), len(stored)):
            skipped = max(0, -(-(stored[i].start - low) // step))
            start, stop = low + skipped * step, min(high, stored[i].stop)
            if stored[i].start >= high:
                break
            if start < stop:
                local = held.offsets[i] + start - stored[i].start
                segments.append(Segment(local, whole + skipped, len(range(start, stop, step)), step))
        whole += len(range(low, high, step))
    return tuple(segments) if step == 1 else _evenly_spaced(segments)


def _evenly_spaced(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Join evenly spaced single indices, or each row of interleaved matrices would need a copy."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        follows = last is not None and segment.length == 1 and segment.whole == last.whole + last.length
        if last is not None and follows:
            space = segment.local - last.local if last.length == 1 else last.step
            if space > 0 and segment.local == last.local + last.length * space:
                joined[-1] = Segment(last.local, last.whole, last.length + 1, space)
                continue
        joined.append(segment if segment.length > 1 else segment._replace(step=1))
    return tuple(joined)


@dataclass(frozen=True)
class Span:
    """A rectangle of a piece: index ranges in local storage, in the matrix and in the piece."""

    local: tuple[slice, slice]
    whole: tuple[slice, slice]
    piece: tuple[slice, slice]


def spans(piece: Piece) -> tuple[Span, ...]:
    """The rectangles of a piece."""
    return tuple(
        Span(
            (_stored(row), _stored(col)),
            (slice(row.whole, row.whole + row.length), slice(col.whole, col.whole + col.length)),
            (slice(row_start, row_start + row.length), slice(col_start, col_start + col.length)),
        )
        for row, row_start in _starts(piece.rows)
        for col, col_start in _starts(piece.cols)
    )


def _stored(segment: Segment) -> slice:
    stop = segment.local + (segment.length - 1) * segment.step + 1
    # None for contiguous ranges, to compare equal to slice(a, b).
    return slice(segment.local, stop, segment.step if segment.step > 1 else None)


def _starts(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    return zip(segments, accumulate((segment.length for segment in segments), initial=0), strict=False)


class Geometry:
    """Every rank's piece of every matrix of a stack; no piece without elements."""

    def __init__(self, layout: Layout, stack: MatrixStack) -> None:
        self.layout = layout
        self.stack = stack
        shape, split = layout.shape, stack.row_dims
        self.col_count = prod(shape[split:])
        self._starts = [matrix.rows[0].start for matrix in stack.matrices]
        self._reach = max(matrix.rows[-1].stop - matrix.rows[0].start for matrix in stack.matrices)
        self._in_order = all(a <= b for a, b in pairwise(self._starts))
        self._elements: list[dict[int, int]] = []
        # A rank's coordinate on the separate axes; and on the separate and replicated axes.
        self.tensor: dict[int, tuple[int, ...]] = {}
        self.replica: dict[int, tuple[int, ...]] = {}
        self.pieces: dict[int, dict[int, Piece]] = {}
        self.local_shape: dict[int, tuple[int, ...]] = {}
        for rank, coordinate in layout.mesh.coordinates.items():
            dims = region(layout, coordinate)
            self.local_shape[rank] = tuple(sum(stop - start for start, stop in dim) for dim in dims)
            placed = list(zip(layout.placements, coordinate, strict=True))
            self.tensor[rank] = tuple(c for placement, c in placed if isinstance(placement, Separate))
            self.replica[rank] = tuple(c for placement, c in placed if not isinstance(placement, Cut))
            rows, cols = flattened(dims[:split], shape[:split]), flattened(dims[split:], shape[split:])
            self.pieces[rank] = self._pieces(Stored(rows), Stored(cols))

    def _pieces(self, rows: Stored, cols: Stored) -> dict[int, Piece]:
        @cache
        def col_segments(wanted: Intervals | None, step: int) -> tuple[Segment, ...]:
            return intersect(cols, (Interval(0, self.col_count),) if wanted is None else wanted, step)

        held = {}
        for index in self._candidates(rows.intervals):
            matrix = self.stack.matrices[index]
            if across := col_segments(matrix.cols, matrix.col_step):
                down = intersect(rows, matrix.rows, matrix.row_step)
                if down:
                    held[index] = Piece(down, across)
        return held

    def _candidates(self, rows: Intervals) -> Iterable[int]:
        # 256 experts over 64 ranks would otherwise need 16,384 intersections.
        if not rows:
            return ()
        if not self._in_order:
            return range(len(self.stack.matrices))
        first = max(0, bisect_right(self._starts, rows[0].start - self._reach))
        return range(first, bisect_right(self._starts, rows[-1].stop - 1))

    def shape(self, index: int) -> tuple[int, int]:
        return self.stack.matrices[index].shape(self.col_count)

    def numel(self, index: int) -> int:
        return prod(self.shape(index))

    def by_replica(self, ranks: Iterable[int], *, joined: bool = False) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica among `ranks`, in their order; with `joined`, of all replicas of each tensor."""
        coordinates = self.tensor if joined else self.replica
        replicas: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            replicas.setdefault(coordinates[rank], []).append(rank)
        return tuple(map(tuple, replicas.values()))

    def elements(self, index: int) -> dict[int, int]:
        if not self._elements:
            self._elements = [{} for _ in self.stack.matrices]
            for rank, held in self.pieces.items():
                for number, piece in held.items():
                    self._elements[number][rank] = piece.numel
        return self._elements[index]


class Geometries:
    """The pieces of every parameter; equal layouts and stacks share a Geometry."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.shared: list[Geometry] = []
        self.index: list[int] = []
        known: dict[tuple[Layout, MatrixStack], int] = {}
        for parameter in parameters:
            key = (parameter.layout, parameter.stack)
            if key not in known:
                known[key] = len(self.shared)
                self.shared.append(Geometry(*key))
            self.index.append(known[key])

    def __getitem__(self, parameter: int) -> Geometry:
        return self.shared[self.index[parameter]]
