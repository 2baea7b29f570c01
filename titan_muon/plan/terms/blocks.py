"""Blockwise tensor parallelism: each rank's block of a cut matrix is a separate matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ...options import MuonOptions
from .layout import Geometries, Geometry, Intervals, flattened, merged, region
from .types import Cut, Interval, Layout, MatrixRows, MatrixStack, Parameter


def in_blocks(parameters: Sequence[Parameter], geometries: Geometries) -> list[Parameter]:
    """Parameters with blocks instead of cut matrices."""
    stacks = [_in_blocks(geometry) for geometry in geometries.shared]
    return [replace(p, stack=stacks[geometries.index[number]]) for number, p in enumerate(parameters)]


def blocks_reason(options: MuonOptions, before: Sequence[Parameter], after: Sequence[Parameter]) -> str:
    """Note for the user on the number of cut matrices; empty unless the mode is blockwise."""
    if options.tensor_parallel != "blockwise":
        return ""
    pairs = zip(before, after, strict=True)
    cut = sum(len({*old.stack.matrices} - {*new.stack.matrices}) for old, new in pairs if old.stack != new.stack)
    return (
        f"tensor_parallel = 'blockwise' is inexact: of {cut:,} matrices that tensor parallelism cuts, each block is "
        "orthogonalized as a matrix of its own"
    )


def _in_blocks(geometry: Geometry) -> MatrixStack:
    stack, layout = geometry.stack, geometry.layout
    if not geometry.cut_by_peers:
        return stack
    down, parts = _parts(layout, stack.row_dims)
    matrices: list[MatrixRows] = []
    for index, matrix in enumerate(stack.matrices):
        cut = index in geometry.cut_by_peers
        matrices += _blocks(matrix, geometry.col_count, parts, down=down) if cut else [matrix]
    return replace(stack, matrices=tuple(matrices))


def _parts(layout: Layout, row_dims: int) -> tuple[bool, list[Intervals]]:
    """Whether tensor parallelism cuts rows, and the rows (or columns) of each rank of its axis."""
    axis, shape = layout.tensor_parallel, layout.shape
    assert axis is not None, "tensor parallelism cuts every stack that has blocks"
    placement = layout.placements[axis]
    assert isinstance(placement, Cut), "a replicated tensor is not cut"
    dim = placement.dim
    # All ranks of a coordinate together, because FSDP cuts further.
    along = [
        range(size if isinstance(other, Cut) and other.dim == dim else 1)
        for other, size in zip(layout.placements, layout.mesh.shape, strict=True)
    ]
    parts = []
    for place in along[axis]:
        coordinates = product(*along[:axis], (place,), *along[axis + 1 :])
        stored = merged(sorted(interval for at in coordinates for interval in region(layout, at)[dim]))
        dims = [stored if other == dim else merged([Interval(0, size)]) for other, size in enumerate(shape)]
        side = slice(row_dims) if dim < row_dims else slice(row_dims, None)
        parts.append(flattened(dims[side], shape[side]))
    return dim < row_dims, parts


def _blocks(matrix: MatrixRows, col_count: int, parts: Sequence[Intervals], *, down: bool) -> Iterator[MatrixRows]:
    cols = matrix.cols or (Interval(0, col_count),)
    for place, part in enumerate(parts):
        label = f"{matrix.label}/tp{place}"
        if down and (rows := _within(matrix.rows, matrix.row_step, part)):
            yield replace(matrix, label=label, rows=rows)
        elif not down and (kept := _within(cols, matrix.col_step, part)):
            yield replace(matrix, label=label, cols=kept)


def _within(wanted: Intervals, step: int, part: Intervals) -> Intervals:
    """The indices of `part` among every `step`-th index of the wanted intervals."""
    inside = []
    for start, stop in wanted:
        for low, high in part:
            # At a counted index, because the new interval counts steps from its start.
            first, last = start + step * max(0, -(-(low - start) // step)), min(stop, high)
            if first < last:
                inside.append(Interval(first, last))
    return tuple(inside)
