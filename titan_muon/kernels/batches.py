"""Launches of tables: two normalize the matrices of a batch before Newton-Schulz, and one writes the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..engine.orthogonalize import iteration_calls, products_for, start_norm
from ..engine.step.algorithm import Algorithm, only_orthogonalizes
from ..engine.step.foreach import StepContext, carved
from ..engine.step.views import Batch, pieces_of
from .tables import ALIGNMENT, BLOCK, Row, Table, ViewPlace

PARTS = 128
"""Partial sums of the squares of a matrix."""


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
    _prepared: dict[bool, Callable[[], object]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def run(self, vector: Tensor, words: Sequence[int] | None) -> None:
        """`vector`: the same in each step. `words`: of the vector, if an address in it is not aligned."""
        table = self.table
        aligned = table.aligned and (words is None or not any(words[base] % ALIGNMENT for base in table.bases))
        if aligned not in self._prepared:
            self._prepared[aligned] = self.prepared(vector, aligned=aligned)
        self._prepared[aligned]()

    def prepared(self, vector: Tensor, *, aligned: bool) -> partial[Any]:
        # Imported on use, because only CUDA builds of PyTorch include Triton.
        from . import passes

        table, options = self.table, passes.of_triton(self.options)
        # Single elements take more registers for addresses than vectors.
        options |= {"FLAT": table.flat, "ALIGNED": aligned, "BLOCK": BLOCK, "num_warps": 4 if aligned else 8}
        arguments, grid = (table.tiles, table.rows, vector, *self.more), self.grid or (len(table.tiles),)
        return partial(getattr(passes, self.kernel).run, *arguments, grid=grid, warmup=False, **options)


def takes_batch(rank: StepContext, batch: Batch, algorithm: Algorithm) -> bool:
    """Whether kernels run a batch: the reference keeps torch's bits, and some algorithms and masks change matrices."""
    method = rank.methods[rank.plan.matrices[batch.matrices[0]].work]
    return only_orthogonalizes(algorithm) and not (rank.options.idle == "hold" or method.algorithm == "reference")


def scratch_of(rank: StepContext, batch: Batch) -> list[Tensor]:
    """Meta tensors like a batch's scratch: a second X, or two beside `whole` in wider elements, and squares."""
    first, (count, rows, cols) = rank.plan.matrices[batch.matrices[0]], batch.whole.shape
    runs = rank.methods[first.work].runs(len(rank.iterations[first.parameter].steps))
    square = count, min(rows, cols), min(rows, cols)
    shapes = [(count, rows, cols)] * (1 if batch.whole.element_size() == batch.dtype.itemsize else 2)
    shapes += [square] * (2 if max(runs) == 1 else 4)
    return [torch.empty(shape, dtype=batch.dtype, device="meta") for shape in shapes]


class BatchLaunches:
    """Assembles, orthogonalizes and splits a batch: launches on fixed tensors, made once.

    `scratch`: memory of all batches. `stored`: the place of a view. `flags`: word of the first flag.
    """

    def __init__(
        self,
        rank: StepContext,
        bucket: int,
        batch: Batch,
        algorithm: Algorithm,
        scratch: Tensor,
        stored: Callable[[Tensor], ViewPlace],
        flags: int,
    ) -> None:
        first, count, dtype = rank.plan.matrices[batch.matrices[0]], len(batch.matrices), batch.dtype
        iteration, method = rank.iterations[first.parameter], rank.methods[first.work]
        self._batch, self._algorithm, runs = batch, algorithm, method.runs(len(iteration.steps))
        others, wire = list(carved(scratch, scratch_of(rank, batch))), batch.whole.dtype
        if wire.itemsize == dtype.itemsize:
            others.insert(0, batch.whole.view(dtype))
        result, spare, *squares = others
        # The last run writes to `result`.
        x, spare = (result, spare) if len(runs) % 2 == 0 else (spare, result)
        product = products_for(method, count)
        self._calls = [*iteration_calls(x, spare, squares, iteration.steps, runs, product)]
        if batch.parts and dtype != wire:
            # States change results in the wire's dtype.
            self._calls.append(partial(batch.whole.copy_, result))
        result = batch.whole if batch.parts else result

        def table(pieces: Iterable[tuple[int, Tensor, Tensor]], stack: Tensor) -> Table:
            """`pieces`: a matrix, its part in a buffer, and the place of the part in `batch.whole`."""
            rows, moved = [], int(stack.storage_offset()) - int(batch.whole.storage_offset())
            for matrix, part, whole in pieces:
                place = stack.as_strided(whole.shape, whole.stride(), int(whole.storage_offset()) + moved)
                flag = flags + batch.parameters[matrix]
                rows.append(Row(part.size(0), part.size(1), matrix, flag, 0, (stored(part), stored(place))))
            return Table.of(rows)

        buffers = rank.buffers.buckets[bucket]
        if buffers is None:
            # Local matrices are packed into the batch.
            sources = targets = [(place, whole, whole) for place, whole in enumerate(batch.whole)]
        else:
            sources, targets = (list(pieces_of(batch, pieces)) for pieces in (buffers.sources, buffers.targets))
            # An all-gather brings the piece of each replica, and a norm needs each element once.
            sources = list({(piece[2].storage_offset(), piece[2].shape): piece for piece in sources}.values())
        assert sum(part.numel() for _, part, _ in sources) == batch.whole.numel(), "a norm needs each element once"
        pieces, types = table(sources, x), {"PIECE": wire, "PARTS": PARTS}
        # Tiles are in the order of matrices.
        counts = torch.bincount(pieces.rows[pieces.tiles, 3], minlength=count).tolist()
        ends = rank.on_device(torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device="cpu"))
        parts = torch.empty(count, PARTS, dtype=torch.float32, device=rank.device)
        pieces, broken = pieces.on(rank.on_device), batch.broken.view(torch.int8)
        types_of_x = types | {"X": dtype, "ROUNDED": wire == dtype == torch.bfloat16}
        self._before = (
            TableLaunch("norm_parts", pieces, types, (ends, parts), (PARTS, count)),
            TableLaunch("normalize", pieces, types_of_x, (ends, parts, broken, iteration.eps, start_norm(dtype))),
        )
        self._behind = list[TableLaunch]()
        # Local results are where the update reads them, unless in another dtype.
        if buffers is not None or result.dtype != batch.results.dtype:
            types = {"PIECE": batch.results.dtype, "X": result.dtype}
            self._behind.append(TableLaunch("split", table(targets, result).on(rank.on_device), types))

    def run(self, vector: Tensor, words: Sequence[int] | None) -> None:
        """`vector`, `words`: as of a launch."""
        for launch in self._before:
            launch.run(vector, words)
        for call in self._calls:
            call()
        for part in self._batch.parts:
            states: dict[str, Any] = part.stacked()
            self._algorithm.rescale(part.whole, states, part.group, transposed=part.transposed)
            part.store(states)
        for launch in self._behind:
            launch.run(vector, words)
