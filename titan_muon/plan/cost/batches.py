"""Which matrices are orthogonalized together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..terms.pieces import Pieces
from ..terms.types import Matrix
from ..terms.work import Work


def batches(chosen: Sequence[int], matrices: Sequence[Matrix], works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Matrices, by index, in batches of one shape and one work, in order; slices before them, each by itself."""
    # The owners of the slices of a matrix wait for each other in each of its products. If one had whole matrices first,
    # the others would be idle meanwhile. And each takes its slices by their number in the plan: owners that took those
    # of two matrices in different orders would wait for each other forever.
    found: list[tuple[int, ...]] = [(index,) for index in sorted(chosen) if matrices[index].slice is not None]
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index in chosen:
        matrix = matrices[index]
        if matrix.slice is None:
            alike.setdefault((matrix.rows, matrix.cols, matrix.work), []).append(index)
    for (_, _, work), indices in alike.items():
        start = 0
        for size in batch_sizes(len(indices), works[work]):
            found.append(tuple(indices[start : start + size]))
            start += size
    return tuple(found)


def batch_sizes(count: int, work: Work) -> list[int]:
    """How many of `count` matrices of one shape are in each batch."""
    # Even sizes where one batch cannot take them all: 9 with room for 8 are 5 and 4, not 8 and 1. The workspace is as
    # large as the largest batch, and a small last one would run at the low rate of a single matrix.
    parts = -(-count // work.batch)
    size = -(-count // parts)
    return [size] * (count // size) + ([count % size] if count % size else [])


def counted_batches(
    counts: Iterable[tuple[int, int]], pieces: Pieces, works: Sequence[Work]
) -> Iterator[tuple[Matrix, int]]:
    """(one of its matrices, size) of each batch of so many matrices of these kinds, as `batches` makes them."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for kind, count in counts:
        matrix = pieces.matrices[pieces.examples[kind]]
        found = alike.setdefault((matrix.rows, matrix.cols, matrix.work), [pieces.examples[kind], 0])
        found[1] += count
    for example, count in alike.values():
        matrix = pieces.matrices[example]
        yield from ((matrix, size) for size in batch_sizes(count, works[matrix.work]))
