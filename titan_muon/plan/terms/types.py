"""The planner's vocabulary: frozen data from the placement of one tensor to the plan of a whole step."""

# [Note: pieces]
# matrix   the 2D unit that Newton-Schulz sees: a parameter, or one of its experts, heads or fused projections.
# piece    the part of a matrix that one rank stores. It need not be one rectangle: FSDP over tensor parallelism leaves
#          a rank several row ranges (StridedShard), and the rows of q in a fused q|k|v are apart from each other.
# segment  rows (or columns) that are consecutive in the matrix and evenly spaced in the rank's storage: gate and up may
#          take turns there. A piece is its row segments crossed with its column segments, because placements cut every
#          dim on its own.
# span     one such crossing (layout.Span): the largest rectangle that one strided copy can move.
# parcel   a piece as it lies in a flat buffer (legs.Parcel): row-major and without gaps, so that a collective's splits
#          are plain element counts and nothing but the matrix travels.

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .work import FLOAT32_PASSES, Passes, Work


class Interval(NamedTuple):
    """Indices start <= i < stop."""

    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """Cut along a tensor dim over one mesh axis, as torch.chunk cuts."""

    # torch.chunk's parts are ceil(length / count) long: the last are shorter or empty. An even split would give ranks
    # other rows than DTensor stores there, and every offset that is computed from it would be wrong.
    dim: int


@dataclass(frozen=True)
class StridedShard:
    """Cut along a tensor dim into `split_factor` parts, each of which is cut over one mesh axis."""

    # FSDP2 shards what tensor or expert parallelism has cut before along the same dim, but its mesh axis comes first in
    # the DTensor's mesh. Two Shards of that dim would be read from left to right, which is another order of the rows.
    dim: int
    split_factor: int


@dataclass(frozen=True)
class Replicate:
    """The same on every rank of one mesh axis."""


Placement = Shard | StridedShard | Replicate


@dataclass(frozen=True)
class Mesh:
    """An n-dimensional arrangement of ranks: `ranks` are the global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert prod(self.shape) == len(self.ranks), f"mesh {self.shape} cannot hold {len(self.ranks)} ranks"

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Coordinate of the rank at `position` of `ranks`."""
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))


@dataclass(frozen=True)
class Layout:
    """How a tensor of global `shape` is placed on a mesh, one placement for each mesh axis.

    `tensor_parallel` is the axis of tensor parallelism, if that cuts the tensor.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    tensor_parallel: int | None = None

    def __post_init__(self) -> None:
        assert len(self.placements) == len(self.mesh.shape), (
            f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes"
        )


@dataclass(frozen=True)
class MatrixRows:
    """One matrix of a parameter: the ascending rows of the parameter's 2D view that it takes, and its columns of them.

    Of each interval of `rows` it has every `row_step`-th row from the first on, and so with columns. `cols` None: all.
    """

    label: str
    rows: tuple[Interval, ...]
    cols: tuple[Interval, ...] | None = None
    row_step: int = 1
    col_step: int = 1

    def __post_init__(self) -> None:
        for side in (self.rows, self.cols or ()):
            assert all(a.stop <= b.start for a, b in pairwise(side)), f"indices of matrix {self.label} do not ascend"

    def shape(self, col_count: int) -> tuple[int, int]:
        """Rows and columns, where the parameter's 2D view has `col_count` columns."""
        cols = col_count if self.cols is None else _count(self.cols, self.col_step)
        return _count(self.rows, self.row_step), cols


def _count(intervals: tuple[Interval, ...], step: int) -> int:
    return sum(len(range(start, stop, step)) for start, stop in intervals)


@dataclass(frozen=True)
class MatrixStack:
    """A parameter read as matrices: its first `row_dims` dims are flattened to rows, the others to columns.

    `transposed`: what is stored as rows are the matrices' columns, as where a layer stores (in, out).
    """

    row_dims: int
    matrices: tuple[MatrixRows, ...]
    transposed: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether matrices share rows of the storage, or take turns in them."""
        return any(matrix.cols is not None or matrix.row_step > 1 for matrix in self.matrices)


@dataclass(frozen=True)
class Parameter:
    """A parameter as the planner sees it. A `plain` tensor is no DTensor: every rank of its mesh has one.

    `own`: theirs are not the same, or not known to be, so that no rank can do another's work. `state_ranks` keep its
    momentum, in the order of its parts; where there are none, every rank that has the parameter does. An element has
    `element_bytes`.
    """

    fqn: str
    layer: str
    layout: Layout
    stack: MatrixStack
    plain: bool = False
    own: bool = False
    state_ranks: tuple[int, ...] = ()
    element_bytes: int = 4


@dataclass(frozen=True)
class Slice:
    """Part number `place` of a matrix that is cut into `count` equal ones: of its rows (`cuts_rows`), or columns."""

    place: int
    count: int
    cuts_rows: bool


@dataclass(frozen=True)
class Matrix:
    """Matrix number `index` of parameter number `parameter`; `work` is its index in the plan's works.

    A matrix that several ranks orthogonalize together is `count` matrices in the plan, each a `slice` with an owner of
    its own; they follow each other.
    """

    parameter: int
    index: int
    rows: int
    cols: int
    flops: int
    work: int = 0
    slice: Slice | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.cols

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix that this is, or is a slice of."""
        if self.slice is None:
            return self.rows, self.cols
        count = self.slice.count
        return (count * self.rows, self.cols) if self.slice.cuts_rows else (self.rows, count * self.cols)


class Segment(NamedTuple):
    """`length` indices from `local` on in a rank's storage, every `step`-th: those from `whole` on in the matrix."""

    local: int
    whole: int
    length: int
    step: int = 1


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that one rank stores: all crossings of row segments and column segments, [Note: pieces]."""

    rows: tuple[Segment, ...]
    cols: tuple[Segment, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the piece."""
        return sum(s.length for s in self.rows), sum(s.length for s in self.cols)

    @property
    def numel(self) -> int:
        """Elements."""
        rows, cols = self.shape
        return rows * cols


@dataclass(frozen=True)
class Bucket:
    """What travels in one collective there and one back, by the pattern `exchange` in `exchanges.PATTERNS`.

    `group` are the global ranks that take part. `matrices[i]` (an index into the plan's matrices) is orthogonalized by
    rank `owners[i]`, and by its tensor-parallel peers where the pattern duplicates; without owners every rank does what
    it stores a piece of. Buckets of one `round` are in flight together.
    """

    exchange: str
    group: tuple[int, ...]
    matrices: tuple[int, ...]
    owners: tuple[int, ...]
    round: int = 0


@dataclass(frozen=True)
class Plan:
    """Who orthogonalizes which matrix, and how the pieces get there and back.

    `local[i]` are the ranks that store all of matrix i and orthogonalize it without communication; the matrices of the
    buckets have none. A rank runs the buckets of its groups round by round, in the order of `buckets`; `slots` rounds
    have buffers at a time. `wire_bytes` are of an element. `works` are the ways in which matrices are orthogonalized.
    The stacks of `parameters` have slices of what is sliced. `reason` says if the planner left off before it had tried
    all it would, what became of `split_over`, and what ranks do each for itself although it looks like copies. `passes`
    are those of momentum and updates over the stored pieces.
    """

    # A Plan is data without processes, devices or modules, and the same for every rank although each runs its own part:
    # only so can ranks compare plans before their first collective. Two ranks with different plans would wait in
    # different collectives, which hangs, or take each other's bytes for another matrix, which nobody would notice.

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    local: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]
    buffer_sets: int
    wire_bytes: int
    works: tuple[Work, ...]
    reason: str = ""
    passes: Passes = FLOAT32_PASSES

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max((bucket.round for bucket in self.buckets), default=-1) + 1

    @property
    def whole_matrices(self) -> int:
        """Number of matrices, those that are sliced counted once."""
        return sum(matrix.slice is None or matrix.slice.place == 0 for matrix in self.matrices)

    def out_in(self, number: int) -> tuple[int, int]:
        """Outputs and inputs of a whole matrix: its rows and columns, unless its layer stores (in, out)."""
        matrix = self.matrices[number]
        shape = matrix.whole_shape
        return shape[::-1] if self.parameters[matrix.parameter].stack.transposed else shape

    def to_json(self) -> str:
        """The whole plan as JSON text."""
        # Sorted keys and no sets: the text must not depend on the hash seed, which differs between processes.
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of the plan, in hex: two ranks may communicate only if theirs are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
