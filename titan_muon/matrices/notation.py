"""The matrices of a parameter from einops notation, `(g f) d -> g | f d`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from einops import EinopsError
from einops.parsing import ParsedExpression

from ..engine.layout.types import Interval, MatrixRows, MatrixStack

Lengths = Mapping[str, int | Sequence[int]]
"""A list cuts an axis into parts of different matrices."""


@dataclass(frozen=True)
class Notation:
    """The axes of each dim of the parameter, of the matrix count, of the rows and of the columns."""

    dims: tuple[tuple[str, ...], ...]
    count: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]


class IndexRange(NamedTuple):
    """The `length` indices from `start` on an axis of length `size`."""

    size: int
    start: int
    length: int


@lru_cache(maxsize=64)
def stack_in(dims: str, shape: tuple[int, ...], fixed: tuple[tuple[str, int | tuple[int, ...]], ...]) -> MatrixStack:
    """The matrices of a parameter of this shape, by einops notation. Raises ValueError for invalid arguments.

    Axes may have any order within rows and within columns, because orthogonalization commutes with permutations.
    """
    # Kept, because a model has thousands of parameters of few shapes, with hundreds of experts each.
    notation, lengths = parsed(dims), dict(fixed)
    parts = _parts(notation, lengths)
    sizes = _sizes(notation, shape, {**lengths, **{axis: sum(part) for axis, part in parts.items()}})
    row_dims, transposed = _sides(notation)
    choices = [_choices(axis, sizes[axis], parts) for axis in notation.count]
    matrices = []
    for number, chosen in enumerate(product(*choices)):
        ranges = {axis: IndexRange(size, 0, size) for axis, size in sizes.items()} | dict(
            zip(notation.count, chosen, strict=True)
        )
        rows, row_step = _runs([ranges[axis] for dim in notation.dims[:row_dims] for axis in dim])
        across = [ranges[axis] for dim in notation.dims[row_dims:] for axis in dim]
        cols, col_step = _runs(across)
        whole = prod(part.length for part in across) == prod(part.size for part in across)
        matrices.append(MatrixRows(str(number), rows, None if whole else cols, row_step, 1 if whole else col_step))
    return MatrixStack(row_dims, tuple(matrices), transposed)


def parsed(dims: str) -> Notation:
    """The notation of `dims`. Raises ValueError if `dims` is malformed."""
    left, arrow, right = dims.partition("->")
    count, bar, matrix = right.partition("|")
    if not arrow or not bar:
        raise ValueError("has no arrow and bar, as in '(g f) d -> g | f d'")
    dim_terms, counting, sides = (_expression(part) for part in (left, count, matrix))
    if len(sides) != 2 or not all(sides):
        raise ValueError(f"has {len(sides)} terms after the bar; write two, the rows and the columns")
    left_axes = [axis for term in dim_terms for axis in term]
    right_axes = [axis for term in (*counting, *sides) for axis in term]
    for axis in (*left_axes, *right_axes):
        if left_axes.count(axis) != 1 or right_axes.count(axis) != 1:
            raise ValueError(f"must have the axis {axis!r} once on each side of the arrow")
    return Notation(tuple(map(tuple, dim_terms)), tuple(axis for term in counting for axis in term), *map(tuple, sides))


def _expression(text: str) -> list[list[str]]:
    try:
        parsed_text = ParsedExpression(text)
    except EinopsError as error:
        raise ValueError(f"is not einops notation: {error}") from error
    # A number could be any axis of the other side.
    if parsed_text.has_ellipsis or parsed_text.has_non_unitary_anonymous_axes:
        raise ValueError("has a number or dots for an axis; name the axis, and set its length in lengths")
    return [list(term) for term in parsed_text.composition]


def _parts(notation: Notation, lengths: Lengths) -> dict[str, tuple[int, ...]]:
    """The axes with several lengths."""
    for axis, length in lengths.items():
        if not any(axis in dim for dim in notation.dims):
            raise ValueError(f"has no axis {axis!r}; correct lengths")
        values = (length,) if isinstance(length, int) else tuple(length)
        if not values or not all(type(value) is int and value > 0 for value in values):
            raise ValueError(f"takes for lengths.{axis} a whole number from 1 on, or a list of them, not {length!r}")
        if not isinstance(length, int) and axis not in notation.count:
            raise ValueError(f"has several lengths for {axis!r}; only an axis before the bar has parts")
    return {axis: tuple(length) for axis, length in lengths.items() if not isinstance(length, int)}


def _sizes(notation: Notation, shape: Sequence[int], known: Mapping[str, int | Sequence[int]]) -> dict[str, int]:
    if len(notation.dims) != len(shape):
        raise ValueError(f"names {len(notation.dims)} dims, and the shape is {tuple(shape)}")
    sizes: dict[str, int] = {}
    for axes, size in zip(notation.dims, shape, strict=True):
        fixed = {axis: length for axis in axes if isinstance(length := known.get(axis), int)}
        open_axes = [axis for axis in axes if axis not in fixed]
        rest, over = divmod(size, prod(fixed.values()))
        if len(open_axes) > 1:
            raise ValueError(f"leaves the lengths of {', '.join(open_axes)} open; set all but one in lengths")
        if over or (not open_axes and rest != 1):
            product_of = ", ".join(f"{axis} = {length}" for axis, length in fixed.items())
            raise ValueError(f"does not fit the shape {tuple(shape)}: {product_of or '1'} does not fill {size}")
        sizes |= fixed | dict.fromkeys(open_axes, rest)
    return sizes


def _sides(notation: Notation) -> tuple[int, bool]:
    """The number of leading dims for one side of the matrices, and whether this side is the columns."""
    sides_by_dim = [
        [("rows", "columns")[axis in notation.cols] for axis in dim if axis not in notation.count]
        for dim in notation.dims
    ]
    for number, sides in enumerate(sides_by_dim):
        if len(set(sides)) > 1:
            raise ValueError(f"has rows and columns within dim {number}; reshape the parameter")
    order = [(number, sides[0]) for number, sides in enumerate(sides_by_dim) if sides]
    first, second = order[0][1], order[-1][1]
    row_dims = next((number for number, side in order if side != first), 0)
    if any(side != second for number, side in order if number >= row_dims):
        # Without a 2D view of the storage, every step would copy the parameter.
        raise ValueError("has dims of rows between dims of columns, or the other way round; permute the parameter")
    return row_dims, first == "columns"


def _choices(axis: str, size: int, parts: Mapping[str, Sequence[int]]) -> list[IndexRange]:
    lengths = parts.get(axis, (1,) * size)
    starts = accumulate(lengths, initial=0)
    return [IndexRange(size, start, length) for start, length in zip(starts, lengths, strict=False)]


def _runs(axes: Sequence[IndexRange]) -> tuple[tuple[Interval, ...], int]:
    """The indices of these ranges in the flattened axes: intervals and their step."""
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
    return tuple(Interval(start, start + (count - 1) * step + 1) for start in starts), step
