"""A parameter's matrices in einops' notation, `(g f) d -> g | f d`, and the rows and columns that each takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from einops import EinopsError
from einops.parsing import ParsedExpression

from ..plan.terms.types import Interval, MatrixRows, MatrixStack

Lengths = Mapping[str, int | Sequence[int]]
"""Lengths of axes that the shape leaves open; several are the lengths of unequal parts, each of another matrix."""


@dataclass(frozen=True)
class Notation:
    """`dims` taken apart: the axes of each of the parameter's dims, and the axes that count, are rows, are columns."""

    dims: tuple[tuple[str, ...], ...]
    count: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]


class IndexRange(NamedTuple):
    """The `length` indices from `start` of an axis that has `size`."""

    size: int
    start: int
    length: int


def stack_in(dims: str, shape: Sequence[int], lengths: Lengths) -> MatrixStack:
    """The matrices of a parameter of this shape. Raises ValueError saying what is wrong with `dims` or `lengths`.

    The order of axes within rows and within columns does not matter: orthogonalizing permutes with them.
    """
    notation = parsed(dims)
    parts = _parts(notation, lengths)
    sizes = _sizes(notation, shape, {**lengths, **{axis: sum(each) for axis, each in parts.items()}})
    row_dims, transposed = _sides(notation)
    choices = [_choices(axis, sizes[axis], parts) for axis in notation.count]
    matrices = []
    for number, chosen in enumerate(product(*choices)):
        taken = {axis: IndexRange(size, 0, size) for axis, size in sizes.items()} | dict(
            zip(notation.count, chosen, strict=True)
        )
        rows, row_step = _runs([taken[axis] for dim in notation.dims[:row_dims] for axis in dim])
        across = [taken[axis] for dim in notation.dims[row_dims:] for axis in dim]
        cols, col_step = _runs(across)
        # All columns are said as None: most parameters are read so, and then equal ones compare equal.
        every = prod(one.length for one in across) == prod(one.size for one in across)
        matrices.append(MatrixRows(str(number), rows, None if every else cols, row_step, 1 if every else col_step))
    return MatrixStack(row_dims, tuple(matrices), transposed)


def parsed(dims: str) -> Notation:
    """`dims` taken apart. Raises ValueError if it is no such notation."""
    left, arrow, right = dims.partition("->")
    count, bar, matrix = right.partition("|")
    if not arrow or not bar:
        raise ValueError("has no arrow and bar, as in '(g f) d -> g | f d'")
    named, counting, two = (_expression(part) for part in (left, count, matrix))
    if len(two) != 2 or not all(two):
        raise ValueError(f"has {len(two)} terms after the bar; there are two, the rows and the columns")
    flat = [axis for term in named for axis in term]
    used = [axis for term in (*counting, *two) for axis in term]
    for axis in (*flat, *used):
        if flat.count(axis) != 1 or used.count(axis) != 1:
            raise ValueError(f"has the axis {axis!r} not once on each side of the arrow")
    return Notation(tuple(map(tuple, named)), tuple(axis for term in counting for axis in term), *map(tuple, two))


def _expression(text: str) -> list[list[str]]:
    """The terms of one side, each a list of axes."""
    try:
        found = ParsedExpression(text)
    except EinopsError as error:
        raise ValueError(f"is no einops notation: {error}") from error
    # einops' rearrange refuses numbers too: nothing says which axis on the other side one is.
    if found.has_ellipsis or found.has_non_unitary_anonymous_axes:
        raise ValueError("has a number or dots for an axis; name it, and say its length with lengths")
    return [list(term) for term in found.composition]


def _parts(notation: Notation, lengths: Lengths) -> dict[str, tuple[int, ...]]:
    """The axes that are cut into unequal parts. Raises ValueError for lengths that are none."""
    for axis, length in lengths.items():
        if not any(axis in dim for dim in notation.dims):
            raise ValueError(f"has no axis {axis!r}, which lengths names")
        each = (length,) if isinstance(length, int) else tuple(length)
        if not each or not all(type(one) is int and one > 0 for one in each):
            raise ValueError(f"takes for lengths.{axis} a whole number from 1 on, or a list of them, not {length!r}")
        if not isinstance(length, int) and axis not in notation.count:
            raise ValueError(f"has several lengths for {axis!r}; only an axis before the bar has parts")
    return {axis: tuple(length) for axis, length in lengths.items() if not isinstance(length, int)}


def _sizes(notation: Notation, shape: Sequence[int], known: Mapping[str, int | Sequence[int]]) -> dict[str, int]:
    if len(notation.dims) != len(shape):
        raise ValueError(f"names {len(notation.dims)} dims, and the shape is {tuple(shape)}")
    sizes: dict[str, int] = {}
    for axes, size in zip(notation.dims, shape, strict=True):
        said = {axis: length for axis in axes if isinstance(length := known.get(axis), int)}
        open_axes = [axis for axis in axes if axis not in said]
        rest, over = divmod(size, prod(said.values()))
        if len(open_axes) > 1:
            raise ValueError(f"leaves the lengths of {', '.join(open_axes)} open; say all but one with lengths")
        if over or (not open_axes and rest != 1):
            sizes_said = ", ".join(f"{axis} = {length}" for axis, length in said.items())
            raise ValueError(f"does not fit the shape {tuple(shape)}: {sizes_said or '1'} does not fill {size}")
        sizes |= said | dict.fromkeys(open_axes, rest)
    return sizes


def _sides(notation: Notation) -> tuple[int, bool]:
    """How many leading dims hold one side of the matrices, and whether that side is the columns."""
    found = [
        [("rows", "columns")[axis in notation.cols] for axis in dim if axis not in notation.count]
        for dim in notation.dims
    ]
    for number, sides in enumerate(found):
        if len(set(sides)) > 1:
            raise ValueError(f"has rows and columns within dim {number}; reshape the parameter")
    order = [(number, sides[0]) for number, sides in enumerate(found) if sides]
    first, second = order[0][1], order[-1][1]
    row_dims = next((number for number, side in order if side != first), 0)
    if any(side != second for number, side in order if number >= row_dims):
        # Such a matrix is no view of the storage as rows and columns: every step would copy the parameter.
        raise ValueError("has dims of rows between dims of columns, or the other way round; permute the parameter")
    return row_dims, first == "columns"


def _choices(axis: str, size: int, parts: Mapping[str, Sequence[int]]) -> list[IndexRange]:
    """What each matrix along a counting axis takes of it."""
    each = parts.get(axis, (1,) * size)
    return [IndexRange(size, start, length) for start, length in zip(accumulate(each, initial=0), each, strict=False)]


def _runs(axes: Sequence[IndexRange]) -> tuple[tuple[Interval, ...], int]:
    """The indices that are taken of axes flattened to one, the last the fastest: intervals, and the step in each."""
    starts, count, step, stride = [0], 1, 1, 1
    for size, start, length in reversed(axes):
        if length == 1:
            starts = [start * stride + inner for inner in starts]
        elif count == 1:
            count, step = length, stride
            starts = [start * stride + inner for inner in starts]
        elif len(starts) == 1 and stride == count * step:
            count, starts = count * length, [start * stride + starts[0]]
        else:
            starts = [i * stride + inner for i in range(start, start + length) for inner in starts]
        stride *= size
    return tuple(_intervals(starts, count, step)), step


def _intervals(starts: Sequence[int], count: int, step: int) -> Iterator[Interval]:
    for start in starts:
        yield Interval(start, start + (count - 1) * step + 1)
