"""The part of each matrix on each rank, by arithmetic on intervals, and the ranks that assemble a matrix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from .types import Cut, Interval, Layout, Matrix, MatrixStack, Parameter, Piece, Plan, Segment, Separate, Shard

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


def cut_out(intervals: Intervals, start: int, stop: int) -> Intervals:
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
        return cut_out(intervals, *chunk(length, count, index))
    kept: list[Interval] = []
    for part in range(placement.split_factor):
        outer = chunk(length, placement.split_factor, part)
        inner = chunk(outer.stop - outer.start, count, index)
        kept += cut_out(intervals, outer.start + inner.start, outer.start + inner.stop)
    return merged(kept)


def region(layout: Layout, coordinate: Sequence[int]) -> tuple[Intervals, ...]:
    """The indices stored at a mesh coordinate, by dim."""
    return tuple(_stored_along(layout, dim, coordinate) for dim in range(len(layout.shape)))


def regions(layout: Layout) -> dict[int, tuple[Intervals, ...]]:
    """The region of each rank."""
    along = cache(partial(_stored_along, layout))
    # Ranks with equal coordinates on the axes that cut a dim store the same of it.
    cutting = [
        [bool(layout.rows and dim == 0) or (isinstance(p, Cut) and p.dim == dim) for p in layout.placements]
        for dim in range(len(layout.shape))
    ]
    return {
        rank: tuple([along(dim, tuple(map(mul, coordinate, axes))) for dim, axes in enumerate(cutting)])
        for rank, coordinate in layout.mesh.coordinates.items()
    }


def _stored_along(layout: Layout, dim: int, coordinate: Sequence[int]) -> Intervals:
    if layout.rows and dim == 0:
        return merged([layout.rows[layout.mesh.position(coordinate)]])
    stored = merged([Interval(0, layout.shape[dim])])
    for placement, count, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        if isinstance(placement, Cut) and placement.dim == dim:
            stored = shard(stored, placement, count, index)
    return stored


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

    # Pieces are made when asked for, because a rank's program reads those of few ranks.

    def __init__(self, layout: Layout, stack: MatrixStack) -> None:
        self.layout = layout
        self.stack = stack
        self.col_count = prod(layout.shape[stack.row_dims :])
        self._starts = [matrix.rows[0].start for matrix in stack.matrices]
        self._reach = max(matrix.rows[-1].stop - matrix.rows[0].start for matrix in stack.matrices)
        self._in_order = all(a <= b for a, b in pairwise(self._starts))
        self._elements: list[dict[int, int]] = []
        self._pieces: dict[int, dict[int, Piece]] = {}
        self._regions = regions(layout)
        separate = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Separate)]
        uncut = [axis for axis, placement in enumerate(layout.placements) if not isinstance(placement, Cut)]
        coordinates = layout.mesh.coordinates.items()
        # A rank's coordinate on the separate axes; and on the separate and replicated axes.
        self.tensor = {rank: tuple([coordinate[axis] for axis in separate]) for rank, coordinate in coordinates}
        self.replica = {rank: tuple([coordinate[axis] for axis in uncut]) for rank, coordinate in coordinates}

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return tuple([sum([stop - start for start, stop in dim]) for dim in self._regions[rank]])

    def pieces(self, rank: int) -> Mapping[int, Piece]:
        """The rank's pieces, by number of the matrix."""
        if rank not in self._pieces:
            self._pieces[rank] = self._pieces_of(rank)
        return self._pieces[rank]

    def _pieces_of(self, rank: int) -> dict[int, Piece]:
        dims, shape, split = self._regions[rank], self.layout.shape, self.stack.row_dims
        rows, cols = (Stored(flattened(dims[side], shape[side])) for side in (slice(split), slice(split, None)))

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

    def by_replica(self, ranks: Iterable[int], *, joined: bool = False) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica among `ranks`, in their order; with `joined`, of all replicas of each tensor."""
        coordinates = self.tensor if joined else self.replica
        replicas: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            replicas.setdefault(coordinates[rank], []).append(rank)
        return tuple(map(tuple, replicas.values()))

    def elements(self, index: int) -> dict[int, int]:
        """Elements of a matrix, by rank with any."""
        if not self._elements:
            self._elements = [{} for _ in self.stack.matrices]
            in_blocks = self.stack.is_in_blocks(self.layout.shape)
            for rank in self._regions:
                for number, numel in self._numels_of_blocks(rank) if in_blocks else self._numels(rank):
                    self._elements[number][rank] = numel
        return self._elements[index]

    def _numels(self, rank: int) -> Iterable[tuple[int, int]]:
        # Without `pieces`, which would keep the pieces of all ranks.
        return ((number, piece.numel) for number, piece in self._pieces_of(rank).items())

    def _numels_of_blocks(self, rank: int) -> Iterable[tuple[int, int]]:
        # Thousands of ranks with hundreds of experts: no need to look for the pieces.
        numel, (rows, *_) = prod(shape := self.local_shape(rank)), self._regions[rank]
        if self.stack.row_dims == 1:
            return ((0, numel),) if numel else ()
        return ((n, numel // shape[0]) for start, stop in rows for n in range(start, stop) if numel)


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


Ranks = tuple[int, ...]


class Pieces:
    """The piece of each matrix of a plan on each rank.

    `kinds`: by matrix. Matrices of a kind have the same work, and pieces of the same sizes on the same ranks.
    `examples`: a matrix of each kind.
    """

    # A model has tens of thousands of experts and a few kinds.

    def __init__(self, matrices: Sequence[Matrix], geometries: Geometries, ranks_per_node: int = 8) -> None:
        self.matrices = matrices
        self.ranks_per_node = ranks_per_node
        self.geometries = geometries
        self.kinds, self.examples = _kinds(matrices, geometries)
        self._holders: dict[tuple[int, Ranks], Mapping[int, int]] = {}
        self._replicas: dict[tuple[int, Ranks], tuple[Ranks, ...]] = {}

    @classmethod
    def from_plan(cls, plan: Plan, ranks_per_node: int = 8) -> Pieces:
        return cls(plan.matrices, Geometries(plan.parameters), ranks_per_node)

    def ranks(self) -> list[int]:
        return sorted({rank for geometry in self.geometries.shared for rank in geometry.layout.mesh.ranks})

    def geometry(self, matrix: int) -> Geometry:
        return self.geometries[self.matrices[matrix].parameter]

    def find(self, matrix: int, rank: int) -> Piece | None:
        return self.geometry(matrix).pieces(rank).get(self.matrices[matrix].index)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def holders(self, kind: int, group: Ranks) -> Mapping[int, int]:
        """Elements of a matrix of the kind, by rank of the group with any."""
        # Kept, because a search deals the same matrices hundreds of times.
        if (kind, group) not in self._holders:
            example, members = self.examples[kind], frozenset(group)
            elements = self.geometry(example).elements(self.matrices[example].index)
            self._holders[kind, group] = {rank: size for rank, size in elements.items() if rank in members}
        return self._holders[kind, group]

    def replicas(self, kind: int, group: Ranks) -> tuple[Ranks, ...]:
        """The ranks of each replica of a kind's matrices; equal positions store equal pieces."""
        if (kind, group) not in self._replicas:
            geometry, members = self.geometry(self.examples[kind]), frozenset(group)
            # Mesh order is the order of pieces in every replica.
            in_mesh = (rank for rank in geometry.layout.mesh.ranks if rank in members)
            self._replicas[kind, group] = geometry.by_replica(in_mesh)
        return self._replicas[kind, group]


def _kinds(matrices: Sequence[Matrix], geometries: Geometries) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # By geometry first, because comparing the elements of every expert takes long.
    stored: dict[tuple[int, int], int] = {}
    classes: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    numbers: dict[tuple[int, int, int], int] = {}
    kinds: list[int] = []
    examples: list[int] = []
    for number, matrix in enumerate(matrices):
        place = (geometries.index[matrix.parameter], matrix.index)
        if place not in stored:
            elements = tuple(geometries.shared[place[0]].elements(matrix.index).items())
            stored[place] = classes.setdefault((place[0], elements), len(classes))
        key = (stored[place], matrix.rows, matrix.work)
        if key not in numbers:
            numbers[key] = len(examples)
            examples.append(number)
        kinds.append(numbers[key])
    return tuple(kinds), tuple(examples)


def components(sets: Iterable[Sequence[int]]) -> dict[int, Ranks]:
    """For each rank, the ranks connected by common sets, ascending."""
    # Neighbouring heads or experts may share a rank, and each overlapping group would need a process group.
    component: dict[int, Ranks] = {}
    for ranks in sets:
        first = component.get(ranks[0])
        # Thousands of matrices have the same holders.
        if first is None or any(component.get(rank) is not first for rank in ranks):
            joined = tuple(sorted({*ranks, *(peer for rank in ranks for peer in component.get(rank, ()))}))
            component |= dict.fromkeys(joined, joined)
    return component
