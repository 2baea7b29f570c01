"""Which matrices are orthogonalized together."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import Work
from .types import Matrix


def batches(chosen: Sequence[int], matrices: Sequence[Matrix], works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Matrices, by index, in batches of one shape and one work, in order."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index in chosen:
        matrix = matrices[index]
        alike.setdefault((matrix.rows, matrix.cols, matrix.work), []).append(index)
    found: list[tuple[int, ...]] = []
    for (_, _, work), indices in alike.items():
        # Even sizes where one batch cannot take them all: 9 with room for 8 are 5 and 4, not 8 and 1. The workspace is
        # as large as the largest batch, and a small last one would run at the low rate of a single matrix.
        parts = -(-len(indices) // works[work].batch)
        size = -(-len(indices) // parts)
        found += (tuple(indices[start : start + size]) for start in range(0, len(indices), size))
    return tuple(found)
