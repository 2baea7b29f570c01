"""The planner's vocabulary: frozen data from the placement of one tensor to the plan of a whole step.

Nothing here knows of processes, devices or modules, so a plan can be made, compared and printed anywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .cost import Work


class Interval(NamedTuple):
    """Indices start <= i < stop."""

    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """Cut along a tensor dim over one mesh axis, as torch.chunk cuts."""

    dim: int


@dataclass(frozen=True)
class StridedShard:
    """Cut along a tensor dim into `split_factor` parts, each of which is cut over one mesh axis.

    This is how FSDP2 cuts a tensor that tensor or expert parallelism has cut before along the same dim.
    """

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
    """How a tensor of global `shape` rests on a mesh, one placement for each mesh axis."""

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        assert len(self.placements) == len(self.mesh.shape), (
            f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes"
        )


@dataclass(frozen=True)
class Block:
    """One matrix of a parameter: the rows of the parameter's 2D view that it takes, ascending."""

    label: str
    rows: tuple[Interval, ...]

    def __post_init__(self) -> None:
        assert all(a.stop <= b.start for a, b in pairwise(self.rows)), f"rows of block {self.label} do not ascend"


@dataclass(frozen=True)
class Stack:
    """A parameter read as matrices: its first `row_dims` dims are flattened to rows, the others to columns."""

    row_dims: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter as the planner sees it. Of a `plain` tensor every rank orthogonalizes its own copy."""

    fqn: str
    layer: str
    layout: Layout
    stack: Stack
    plain: bool = False


@dataclass(frozen=True)
class Matrix:
    """The 2D unit that Newton-Schulz sees: block `block` of parameter `parameter`, both by index in the plan.

    `work` is the index of how it is orthogonalized among the plan's works.
    """

    parameter: int
    block: int
    rows: int
    cols: int
    flops: int
    work: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.cols


class Segment(NamedTuple):
    """`length` indices from `local` in a rank's storage that are the indices from `whole` in the matrix."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that one rank stores: all crossings of its row segments and column segments."""

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
    """What travels in one collective there and one back.

    `group` are the global ranks that take part. `matrices[i]` (an index into the plan's matrices) is orthogonalized by
    rank `owners[i]`; with exchange `all_gather` there are no owners: every rank does what it holds a piece of.
    Buckets of one `round` are in flight together. `reason` says why an automatic choice fell on this exchange.
    """

    exchange: str
    group: tuple[int, ...]
    matrices: tuple[int, ...]
    owners: tuple[int, ...]
    round: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Who orthogonalizes which matrix, and how the pieces get there and back.

    `home[i]` are the ranks that hold matrix i whole and orthogonalize it without communication; the matrices of the
    buckets have none. All ranks go through the rounds in the same order, and in a round each rank runs the buckets
    whose group it is in, in the order of `buckets`; `slots` rounds have buffers at a time. `works` are the ways in
    which matrices are orthogonalized.
    """

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    home: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]
    slots: int
    wire_bytes: int
    works: tuple[Work, ...]

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max((bucket.round for bucket in self.buckets), default=-1) + 1

    def to_json(self) -> str:
        """The whole plan as JSON text, the same on every rank that made the same plan."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of the plan, in hex: two ranks may communicate only if theirs are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
