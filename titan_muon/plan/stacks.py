"""Which matrices are orthogonalized together."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import Work
from .types import Matrix


def stacks(chosen: Sequence[int], matrices: Sequence[Matrix], works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Matrices, by index, in stacks of one shape and one work, in order.

    Where a work allows fewer in a stack than there are, the stacks are of even size.
    """
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index in chosen:
        matrix = matrices[index]
        alike.setdefault((matrix.rows, matrix.cols, matrix.work), []).append(index)
    found: list[tuple[int, ...]] = []
    for (_, _, work), indices in alike.items():
        parts = -(-len(indices) // works[work].stack)
        size = -(-len(indices) // parts)
        found += (tuple(indices[start : start + size]) for start in range(0, len(indices), size))
    return tuple(found)
