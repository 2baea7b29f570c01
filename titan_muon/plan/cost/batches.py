"""Batches of matrices for a single orthogonalization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..terms.pieces import Pieces
from ..terms.types import Matrix
from ..terms.work import Work


def batches(chosen: Sequence[int], matrices: Sequence[Matrix], works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Indices of each batch: matrices of equal shape and work, or a single slice."""
    # Slices first, because their owners wait for each other. In order of the plan, because owners with two sliced
    # matrices would otherwise deadlock.
    result: list[tuple[int, ...]] = [(index,) for index in sorted(chosen) if matrices[index].slice is not None]
    equal: dict[tuple[int, int, int], list[int]] = {}
    for index in chosen:
        matrix = matrices[index]
        if matrix.slice is None:
            equal.setdefault((matrix.rows, matrix.cols, matrix.work), []).append(index)
    for (_, _, work), indices in equal.items():
        start = 0
        for size in batch_sizes(len(indices), works[work]):
            result.append(tuple(indices[start : start + size]))
            start += size
    return tuple(result)


def batch_sizes(count: int, work: Work) -> list[int]:
    """Sizes of the batches of `count` equal matrices."""
    # 9 matrices with room for 8 become 5 and 4: the largest batch sets the workspace, and small batches are slow.
    parts = -(-count // work.batch)
    size = -(-count // parts)
    return [size] * (count // size) + ([count % size] if count % size else [])


def counted_batches(
    counts: Iterable[tuple[int, int]], pieces: Pieces, works: Sequence[Work]
) -> Iterator[tuple[Matrix, int]]:
    """(example matrix, size) of each batch of `batches`, from (kind, count) pairs."""
    equal: dict[tuple[int, int, int], list[int]] = {}
    for kind, count in counts:
        matrix = pieces.matrices[pieces.examples[kind]]
        example_count = equal.setdefault((matrix.rows, matrix.cols, matrix.work), [pieces.examples[kind], 0])
        example_count[1] += count
    for example, count in equal.values():
        matrix = pieces.matrices[example]
        yield from ((matrix, size) for size in batch_sizes(count, works[matrix.work]))
