"""The planner's data types, from the placement of a tensor to the plan of a step."""

# [Note: pieces]
# matrix   2D unit of Newton-Schulz: a parameter, an expert, a head or a fused projection.
# piece    the part of a matrix on a rank. A piece can be several rectangles: FSDP over tensor parallelism
#          leaves a rank several row ranges (StridedShard).
# segment  rows (or columns), consecutive in the matrix and evenly spaced in the rank's storage, where gate and
#          up rows can alternate. A piece is the product of row segments and column segments.
# span     a rectangle that one strided copy can move (layout.Span): one row segment times one column segment.
# parcel   a piece in a flat buffer (phases.Parcel): row-major and without gaps, so that the splits of a collective are
#          element counts.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from .work import FLOAT32_COST, ElementwiseCost, Work


class Interval(NamedTuple):
    """Indices start <= i < stop."""

    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """Cut along a tensor dim over a mesh axis, like torch.chunk."""

    dim: int


@dataclass(frozen=True)
class StridedShard:
    """Cut along a tensor dim into `split_factor` parts, then cut each part over a mesh axis."""

    # FSDP2 shards a dim already cut by tensor or expert parallelism, but comes first in the DTensor's mesh.
    dim: int
    split_factor: int


@dataclass(frozen=True)
class Replicate:
    """Equal on every rank of a mesh axis."""


@dataclass(frozen=True)
class Separate:
    """A separate tensor on every coordinate of a mesh axis, under one name."""

    # Plain tensors that differ between ranks, and DTensors on sibling meshes, such as `mesh["dp"]` of a dp x tp mesh.


Cut = Shard | StridedShard
Placement = Cut | Replicate | Separate


@dataclass(frozen=True)
class Mesh:
    """`ranks`: global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert prod(self.shape) == len(self.ranks), f"mesh {self.shape} cannot hold {len(self.ranks)} ranks"

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """By rank, in the order of `ranks`."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def position(self, coordinate: Sequence[int]) -> int:
        position = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            position = position * size + index
        return position


@dataclass(frozen=True)
class Layout:
    """Placement of a tensor of global `shape` on a mesh, with a placement for each mesh axis.

    `rows`: the range of dim 0 of each rank of
    the mesh, in the order of ranks; empty if the placements tell the ranges.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    rows: tuple[Interval, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.placements) == len(self.mesh.shape), (
            f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes"
        )
        assert len(self.rows) in (0, len(self.mesh.ranks)), f"rows of {len(self.rows)} ranks"


@dataclass(frozen=True)
class MatrixRows:
    """A matrix of a parameter's 2D view: every `step`-th index of ascending intervals. `cols` None: all columns."""

    label: str
    rows: tuple[Interval, ...]
    cols: tuple[Interval, ...] | None = None
    row_step: int = 1
    col_step: int = 1

    def __post_init__(self) -> None:
        for side in (self.rows, self.cols or ()):
            assert all(a.stop <= b.start for a, b in pairwise(side)), f"indices of matrix {self.label} do not ascend"

    def shape(self, col_count: int) -> tuple[int, int]:
        cols = col_count if self.cols is None else _count(self.cols, self.col_step)
        return _count(self.rows, self.row_step), cols


def _count(intervals: tuple[Interval, ...], step: int) -> int:
    return sum(len(range(start, stop, step)) for start, stop in intervals)


@dataclass(frozen=True)
class MatrixStack:
    """A parameter read as matrices: the first `row_dims` dims are flattened to rows, the rest to columns.

    `transposed`: the parameter stores (in, out), so stored rows are columns of the matrices.
    """

    row_dims: int
    matrices: tuple[MatrixRows, ...]
    transposed: bool = False

    def is_separable(self, shape: Sequence[int]) -> bool:
        """Whether each matrix of a parameter with this shape is within a single index of dim 0."""
        height = prod(shape[1 : self.row_dims])
        return all(m.rows[0].start // height == (m.rows[-1].stop - 1) // height for m in self.matrices)

    def is_in_blocks(self, shape: Sequence[int]) -> bool:
        """Whether the parameter is a matrix, or each index of dim 0 is."""
        count = 1 if self.row_dims == 1 else shape[0]
        height = prod(shape[: self.row_dims]) // max(1, count)
        blocks = [((Interval(number * height, (number + 1) * height),), 1, None) for number in range(count)]
        return [(matrix.rows, matrix.row_step, matrix.cols) for matrix in self.matrices] == blocks

    @cached_property
    def interleaved(self) -> bool:
        return any(matrix.cols is not None or matrix.row_step > 1 for matrix in self.matrices)


StackOf = Callable[[str, Sequence[int]], MatrixStack]
"""The matrices of a parameter, by name and shape. Raises ValueError for a parameter without matrices."""


@dataclass(frozen=True)
class Parameter:
    """A parameter. A `plain` tensor is not a DTensor: every rank of the mesh has such a tensor.

    `state_ranks`: keepers of the momentum, in order of dim 0; empty: every holder.
    """

    fqn: str
    layer: str
    layout: Layout
    stack: MatrixStack
    plain: bool = False
    state_ranks: tuple[int, ...] = ()

    @property
    def separate(self) -> bool:
        """Whether several tensors have this name, each orthogonalized by its own ranks."""
        return Separate() in self.layout.placements


@dataclass(frozen=True)
class Matrix:
    """Matrix number `index` of parameter number `parameter`; `work` is an index into the plan's works."""

    parameter: int
    index: int
    rows: int
    cols: int
    flops: int
    work: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.cols


class Segment(NamedTuple):
    """`length` indices: from `whole` on in the matrix, and every `step`-th from `local` on in the rank's storage."""

    local: int
    whole: int
    length: int
    step: int = 1


@dataclass(frozen=True)
class Piece:
    """Row segments times column segments, [Note: pieces]."""

    rows: tuple[Segment, ...]
    cols: tuple[Segment, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(s.length for s in self.rows), sum(s.length for s in self.cols)

    @property
    def numel(self) -> int:
        rows, cols = self.shape
        return rows * cols


@dataclass(frozen=True)
class Bucket:
    """Matrices of a gather and a return, by the pattern `exchange` in `PATTERNS`.

    `group`: global ranks that take part. Rank `owners[i]` orthogonalizes `matrices[i]` (an index into the plan's
    matrices). Without owners every holder orthogonalizes. Buckets of equal `round` are in flight together.
    """

    exchange: str
    group: tuple[int, ...]
    matrices: tuple[int, ...]
    owners: tuple[int, ...]
    round: int = 0


@dataclass(frozen=True)
class Plan:
    """The owner of each matrix, and the exchange of pieces and results: plain data, equal on every rank.

    Attributes:
        local: for each matrix, the ranks that store and orthogonalize all of it; empty for a matrix in a bucket.
        buckets: in the order of a rank's step.
        buffer_sets: rounds with buffers at the same time.
        reason: notes for the user.
        ranks_per_node: of the nodes that a pattern knows; 0 if none does.
    """

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    local: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]
    buffer_sets: int
    works: tuple[Work, ...]
    reason: str = ""
    passes: ElementwiseCost = FLOAT32_COST
    ranks_per_node: int = 0

    def wire_bytes(self, bucket: Bucket) -> int:
        """Of an element of the bucket in transit."""
        return self.works[self.matrices[bucket.matrices[0]].work].wire_bytes

    @property
    def rounds(self) -> int:
        return max((bucket.round for bucket in self.buckets), default=-1) + 1

    def out_in(self, number: int) -> tuple[int, int]:
        """Outputs and inputs of a matrix: rows and columns, reversed if the layer stores (in, out)."""
        matrix = self.matrices[number]
        shape = matrix.rows, matrix.cols
        return shape[::-1] if self.parameters[matrix.parameter].stack.transposed else shape

    def to_json(self) -> str:
        # No sets: the hash seed differs between processes.
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 in hex, compared between ranks before the first collective."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
