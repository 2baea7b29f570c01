"""Launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .tables import ALIGNMENT, BLOCK, Table


@dataclass(frozen=True)
class Launch:
    """A launch `kernel[grid](*args, **options)`. `run` skips an empty grid."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](*self.args, **self.options)


@dataclass(frozen=True)
class TableLaunch:
    """A launch of a kernel of `passes.py`. `options`: dtypes of PyTorch, and flags. `grid`: other than a table's."""

    kernel: str
    table: Table
    options: Mapping[str, Any]
    grid: tuple[int, ...] = ()

    def run(self, vector: Tensor, words: Sequence[int] | None, *more: Any) -> None:
        """`words`: of the vector, if an address in it is not aligned. `more`: arguments after the vector."""
        is_aligned = words is None or not any(words[base] % ALIGNMENT for base in self.table.bases)
        self.variant(vector, *more, aligned=self.table.aligned and is_aligned).run()

    def variant(self, vector: Tensor, *more: Any, aligned: bool) -> Launch:
        (kernel, options), table = self._compiled, self.table
        # Single elements take more registers for addresses than vectors.
        options = {**options, "FLAT": table.flat, "ALIGNED": aligned, "BLOCK": BLOCK, "num_warps": 4 if aligned else 8}
        return Launch(kernel, self.grid or (len(table.tiles),), (table.tiles, table.rows, vector, *more), options)

    @cached_property
    def _compiled(self) -> tuple[Any, dict[str, Any]]:
        # Imported on use, because only CUDA builds of PyTorch include Triton.
        from . import passes

        return getattr(passes, self.kernel), passes.of_triton(self.options)
