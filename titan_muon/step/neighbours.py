"""Fewer tensors in the lists of a step: neighbouring pieces become one, and so do copies at equal distances."""

# [Note: neighbours]
# - The host takes some microseconds for each tensor of a list, and thousands of experts are pieces of a few parameters.
# - Two matrices of a stack with the same owner are neighbours in the storage and in the buffer. Element-wise work takes
#   them as one piece. Reports, and stages that keep values by matrix, have a piece for each matrix.
# - An owner gets equal pieces from each rank, so their distances in the buffer and in the matrices are equal: between
#   the matrices of a rank, and between the ranks. The rank's own pieces are elsewhere in the buffers.

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..plan.terms.layout import Span
from .foreach import StoredPiece

FEWER = 8
"""A strided copy takes a launch of its own, and a launch takes the host as long as 8 tensors in a list."""

Pair = tuple[Tensor, Tensor]
"""(rows, cols) view of a buffer, and the view of assembled matrices to copy from or to."""


def joined(pieces: Iterable[StoredPiece]) -> list[StoredPiece]:
    """The pieces, with neighbours in the rows of a parameter and in the buffer as one piece of the first matrix."""
    result: list[StoredPiece] = []
    for piece in pieces:
        both = _both(result[-1], piece) if result else None
        if both is None:
            result.append(piece)
        else:
            result[-1] = both
    return result


def _both(first: StoredPiece, second: StoredPiece) -> StoredPiece | None:
    """One piece of two, or None if they are no neighbours."""
    # The factor on the learning rate depends on the shape.
    alike = (first.parameter, first.out_in) == (second.parameter, second.out_in)
    if not alike or len(first.spans) > 1 or len(second.spans) > 1:
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


def strided(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs, or far fewer pairs with further dims that copy the same elements."""
    listed = sorted(pairs, key=lambda pair: pair[0].storage_offset())
    # The matrices of a rank, then the ranks.
    fewer = _at_equal_distances(_at_equal_distances(listed))
    return [_in_words(pair) for pair in fewer] if FEWER * len(fewer) <= len(listed) else listed


def _at_equal_distances(pairs: Sequence[Pair]) -> list[Pair]:
    """Each run of equal views at equal distances as a pair of views with a further dim."""
    result, start = list[Pair](), 0
    while start < len(pairs):
        stop, distances = start + 1, _distances(pairs[start : start + 2])
        while distances and _distances(pairs[stop : stop + 2]) == distances:
            stop += 1
        stop += bool(distances)
        result.append(_repeated(pairs[start], stop - start, distances) if distances else pairs[start])
        start = stop
    return result


def _distances(pairs: Sequence[Pair]) -> tuple[int, ...]:
    """From a pair to the next, in elements of both views; empty without a next pair of equal views."""
    if len(pairs) < 2:
        return ()
    distances = tuple(after.storage_offset() - before.storage_offset() for before, after in zip(*pairs, strict=True))
    equal = all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in zip(*pairs, strict=True))
    return distances if equal and min(distances) > 0 else ()


def _repeated(pair: Pair, count: int, distances: tuple[int, ...]) -> Pair:
    one, other = (
        view.as_strided((count, *view.shape), (distance, *view.stride()))
        for view, distance in zip(pair, distances, strict=True)
    )
    return one, other


def _in_words(pair: Pair) -> Pair:
    """The pair as 8-byte integers, if they are aligned: a strided copy on a GPU moves an element for each thread."""
    words = 8 // pair[0].element_size()
    for view in pair:
        *far, near = view.stride()
        if near != 1 or any(number % words for number in (view.size(-1), view.storage_offset(), *far)):
            return pair
    return pair[0].view(torch.int64), pair[1].view(torch.int64)
