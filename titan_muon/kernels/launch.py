"""Launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """A launch of a kernel of `passes.py`, prepared in the first step.

    Attributes:
        options: dtypes of PyTorch, and flags.
        more: arguments after the vector.
        grid: other than a table's.
    """

    kernel: str
    table: Table
    options: Mapping[str, Any]
    more: tuple[Any, ...] = ()
    grid: tuple[int, ...] = ()
    _prepared: dict[bool, Launch] = field(default_factory=dict, init=False, compare=False, repr=False)

    def run(self, vector: Tensor, words: Sequence[int] | None) -> None:
        """`vector`: the same in each step. `words`: of the vector, if an address in it is not aligned."""
        is_aligned = words is None or not any(words[base] % ALIGNMENT for base in self.table.bases)
        launch = self._prepared.get(is_aligned)
        if launch is None:
            aligned = self.table.aligned and is_aligned
            launch = self._prepared[is_aligned] = self.variant(vector, aligned=aligned)
        launch.run()

    def variant(self, vector: Tensor, *, aligned: bool) -> Launch:
        # Imported on use, because only CUDA builds of PyTorch include Triton.
        from . import passes

        table, options = self.table, passes.of_triton(self.options)
        # Single elements take more registers for addresses than vectors.
        options |= {"FLAT": table.flat, "ALIGNED": aligned, "BLOCK": BLOCK, "num_warps": 4 if aligned else 8}
        arguments = (table.tiles, table.rows, vector, *self.more)
        return Launch(getattr(passes, self.kernel), self.grid or (len(table.tiles),), arguments, options)
