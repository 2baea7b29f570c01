"""Which rank holds which part of which matrix: interval arithmetic over shapes, meshes and placements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod

from .types import Interval, Layout, MatrixStack, Parameter, Piece, Placement, Replicate, Segment, Shard, StridedShard

Intervals = tuple[Interval, ...]


def chunk(length: int, count: int, index: int) -> Interval:
    """Part `index` of `length` cut into `count` as torch.chunk does: equal parts, the last ones short or empty."""
    step = -(-length // count)
    return Interval(min(length, index * step), min(length, (index + 1) * step))


def merged(intervals: Iterable[Interval]) -> Intervals:
    """The same indices in the same order with touching intervals joined and empty ones dropped."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1].stop == start:
            joined[-1] = Interval(joined[-1].start, stop)
        else:
            joined.append(Interval(start, stop))
    return tuple(joined)


def take(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Indices number `start` to `stop` of the listed ones."""
    taken, seen = [], 0
    for interval in intervals:
        low, high = max(start - seen, 0), min(stop - seen, interval.stop - interval.start)
        if low < high:
            taken.append(Interval(interval.start + low, interval.start + high))
        seen += interval.stop - interval.start
    return tuple(taken)


def shard(intervals: Intervals, placement: Shard | StridedShard, count: int, index: int) -> Intervals:
    """What rank `index` of `count` on one mesh axis keeps of the indices that the axes before it left."""
    # Axis after axis, each on what is left of the dim, as DTensor cuts: 10 rows over 4 x 2 ranks leave the last 4-rank
    # coordinate 1 row, which the second axis cannot halve. Cutting 10 rows by 8 at once would give other, wrong, parts.
    length = sum(stop - start for start, stop in intervals)
    if isinstance(placement, Shard):
        return take(intervals, *chunk(length, count, index))
    kept: list[Interval] = []
    for part in range(placement.split_factor):
        outer = chunk(length, placement.split_factor, part)
        inner = chunk(outer.stop - outer.start, count, index)
        kept += take(intervals, outer.start + inner.start, outer.start + inner.stop)
    return merged(kept)


def region(layout: Layout, coordinate: Sequence[int]) -> tuple[Intervals, ...]:
    """The indices that the rank at a mesh coordinate stores, for each dim of the tensor."""
    dims: list[Intervals] = [merged([Interval(0, size)]) for size in layout.shape]
    for placement, count, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            dims[placement.dim] = shard(dims[placement.dim], placement, count, index)
    return tuple(dims)


def flattened(dims: Sequence[Intervals], sizes: Sequence[int]) -> Intervals:
    """Indices into several dims as indices into those dims flattened to one."""
    flat: Intervals = (Interval(0, 1),)
    inner = 1
    for intervals, size in zip(reversed(dims), reversed(sizes), strict=True):
        # While the inner dims are whole an interval stays one interval. The other branch would find the same, but one
        # row after the other: it is for a cut inner dim (tensor parallelism within each expert), where they are apart.
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


@dataclass(frozen=True)
class Stored:
    """Indices that a rank stores along one side: where each interval of them starts, and its place in the storage."""

    # Made once for all matrices of a rank: 1,024 ranks that each store a part of 384 experts have 384 intervals, and
    # would add up their lengths again for each expert.

    intervals: Intervals
    starts: tuple[int, ...]
    offsets: tuple[int, ...]


def stored_as(intervals: Intervals) -> Stored:
    """These indices, one after the other in the storage."""
    lengths = (stop - start for start, stop in intervals)
    return Stored(intervals, tuple(start for start, _ in intervals), tuple(accumulate(lengths, initial=0))[:-1])


def intersect(held: Stored, wanted: Intervals, step: int = 1) -> tuple[Segment, ...]:
    """Where every `step`-th of the wanted indices, counted in their own order, is in the storage of the stored ones."""
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
    """The same segments, with runs of single indices joined where they are evenly spaced."""
    # A rank that stores one of two interleaved matrices alone has each of its rows between two that it has not: without
    # this, one copy for each row.
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


def replica(placements: Sequence[Placement], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Which copy of the tensor a rank is part of: its coordinate on the axes that replicate."""
    return tuple(c for p, c in zip(placements, coordinate, strict=True) if isinstance(p, Replicate))


@dataclass(frozen=True)
class Span:
    """One rectangle of a piece: where it is in local storage, in the whole matrix and in the piece itself."""

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
    # A step of None, as in slice(2, 5), so that what nothing interleaves compares equal to it.
    return slice(segment.local, stop, segment.step if segment.step > 1 else None)


def _starts(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    start = 0
    for segment in segments:
        yield segment, start
        start += segment.length


class Geometry:
    """Every rank's piece of every matrix of one stack on one layout; a rank without any element of it has none."""

    def __init__(self, layout: Layout, stack: MatrixStack) -> None:
        self.layout = layout
        self.stack = stack
        shape, split = layout.shape, stack.row_dims
        self.col_count = prod(shape[split:])
        self._starts = [matrix.rows[0].start for matrix in stack.matrices]
        self._reach = max(matrix.rows[-1].stop - matrix.rows[0].start for matrix in stack.matrices)
        self._in_order = all(a <= b for a, b in pairwise(self._starts))
        self._elements: list[dict[int, int]] = []
        self.replica: dict[int, tuple[int, ...]] = {}
        self.pieces: dict[int, dict[int, Piece]] = {}
        self.local_shape: dict[int, tuple[int, ...]] = {}
        for position, rank in enumerate(layout.mesh.ranks):
            coordinate = layout.mesh.coordinate(position)
            dims = region(layout, coordinate)
            self.local_shape[rank] = tuple(sum(stop - start for start, stop in dim) for dim in dims)
            self.replica[rank] = replica(layout.placements, coordinate)
            rows, cols = flattened(dims[:split], shape[:split]), flattened(dims[split:], shape[split:])
            self.pieces[rank] = self._pieces(stored_as(rows), stored_as(cols))

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
        """Matrices that may touch the rows, by index."""
        # Experts and heads follow each other, so a bisection finds the few that a rank stores: 256 experts over 64
        # ranks would otherwise be 16,384 overlaps to compute. Matrices that interleave reach over each other, no
        # further than the longest of them.
        if not rows:
            return ()
        if not self._in_order:
            return range(len(self.stack.matrices))
        first = max(0, bisect_right(self._starts, rows[0].start - self._reach))
        return range(first, bisect_right(self._starts, rows[-1].stop - 1))

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a matrix, as they are stored."""
        return self.stack.matrices[index].shape(self.col_count)

    def numel(self, index: int) -> int:
        """Elements of a matrix."""
        return prod(self.shape(index))

    @cached_property
    def peers(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of each rank's tensor-parallel group, in the order of their parts; empty if nothing is cut so."""
        axis, mesh = self.layout.tensor_parallel, self.layout.mesh
        found: dict[tuple[int, ...], list[int]] = {}
        for position, rank in enumerate(mesh.ranks if axis is not None else ()):
            coordinate = mesh.coordinate(position)
            found.setdefault((*coordinate[:axis], *coordinate[axis:][1:]), []).append(rank)
        return {rank: tuple(ranks) for ranks in found.values() for rank in ranks}

    @cached_property
    def cut_by_peers(self) -> frozenset[int]:
        """The matrices that tensor parallelism cuts, by index; experts that it deals out whole are not among them."""
        peers = self.peers
        indices = range(len(self.stack.matrices) if peers else 0)
        return frozenset(i for i in indices if len({peers[rank].index(rank) for rank in self.elements(i)}) > 1)

    def elements(self, index: int) -> dict[int, int]:
        """Elements of a matrix that each of its holders stores, in mesh order."""
        if not self._elements:
            self._elements = [{} for _ in self.stack.matrices]
            for rank, held in self.pieces.items():
                for number, piece in held.items():
                    self._elements[number][rank] = piece.numel
        return self._elements[index]


class Geometries:
    """The pieces of every parameter; parameters of equal layout and stack share their Geometry."""

    # The same projection of every layer is one Geometry, or 64 layers would take 64 times as long to plan.

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
