"""Newton-Schulz of a batch between kernels: two assemble and normalize the matrices, one writes the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..engine.orthogonalize import iteration_calls, products_for, start_norm
from ..engine.program.phases import aligned
from ..engine.step.algorithm import Algorithm, only_orthogonalizes
from ..engine.step.foreach import StepContext
from ..engine.step.views import Batch, pieces_of
from .launch import TableLaunch
from .tables import Row, Table, ViewPlace, view_place

PARTS = 128
"""Partial sums of the squares of a matrix."""

BatchPiece = tuple[int, Tensor, Tensor]
"""A matrix of the batch, a part in a buffer, and its place in the batch."""


def takes_batch(rank: StepContext, batch: Batch, algorithm: Algorithm) -> bool:
    """Whether kernels run a batch: the reference keeps torch's bits, and some algorithms and masks change matrices."""
    method = rank.methods[rank.plan.matrices[batch.matrices[0]].work]
    return only_orthogonalizes(algorithm) and not (rank.options.idle == "hold" or method.algorithm == "reference")


def scratch_shapes(rank: StepContext, batch: Batch) -> list[tuple[int, int, int]]:
    """The shapes of a batch's scratch tensors: a second X, or two beside `whole` in wider elements, and squares."""
    first, (count, rows, cols) = rank.plan.matrices[batch.matrices[0]], batch.whole.shape
    runs = rank.methods[first.work].runs(len(rank.iterations[first.parameter].steps))
    others = 1 if batch.whole.element_size() == batch.dtype.itemsize else 2
    square = count, min(rows, cols), min(rows, cols)
    return [(count, rows, cols)] * others + [square] * (2 if max(runs) == 1 else 4)


def iteration_bytes(rank: StepContext, batch: Batch, algorithm: Algorithm) -> int:
    """Bytes of a batch's scratch tensors, if kernels run the batch."""
    if not takes_batch(rank, batch, algorithm):
        return 0
    return sum(aligned(prod(shape)) * batch.dtype.itemsize for shape in scratch_shapes(rank, batch))


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
        self._batch, self._algorithm, self._stored, runs = batch, algorithm, stored, method.runs(len(iteration.steps))
        buffers = rank.buffers.buckets[bucket]
        if buffers is None:
            # Local matrices are packed into the batch.
            sources = targets = [(place, whole, whole) for place, whole in enumerate(batch.whole)]
        else:
            sources, targets = (list(pieces_of(batch, pieces)) for pieces in (buffers.sources, buffers.targets))
            # An all-gather brings the piece of each replica, and a norm needs each element once.
            sources = list({(piece[2].storage_offset(), piece[2].shape): piece for piece in sources}.values())
        assert sum(part.numel() for _, part, _ in sources) == batch.whole.numel(), "a norm needs each element once"
        wire, start, others = batch.whole.dtype, 0, list[Tensor]()
        for shape in scratch_shapes(rank, batch):
            others.append(scratch.view(dtype)[start : start + prod(shape)].view(shape))
            start += aligned(prod(shape))
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
        pieces = self._table(sources, dtype)
        # Tiles are in the order of matrices.
        ends = [0, *torch.bincount(pieces.rows[pieces.tiles, 3], minlength=count).cumsum(0).tolist()]
        words = [(*pair, flags + parameter) for pair, parameter in zip(pairwise(ends), batch.parameters, strict=True)]
        matrices = rank.on_device(torch.tensor(words, dtype=torch.int32, device="cpu"))
        parts = torch.empty(count, PARTS, dtype=torch.float32, device=rank.device)
        pieces, types = pieces.on(rank.on_device), {"PIECE": wire, "PARTS": PARTS}
        normalized = matrices, parts, batch.broken.view(torch.int8), x, iteration.eps, start_norm(dtype)
        types_of_x = types | {"X": dtype, "ROUNDED": wire == dtype == torch.bfloat16}
        self._before = (
            TableLaunch("norm_parts", pieces, types, (matrices, parts), (PARTS, count)),
            TableLaunch("normalize", pieces, types_of_x, normalized),
        )
        self._behind = list[TableLaunch]()
        # Local results are where the update reads them, unless in another dtype.
        if buffers is not None or result.dtype != batch.results.dtype:
            results = self._table(targets, result.dtype).on(rank.on_device)
            types = {"PIECE": batch.results.dtype, "X": result.dtype}
            self._behind.append(TableLaunch("split", results, types, (result,)))

    def _table(self, pieces: Iterable[BatchPiece], dtype: torch.dtype) -> Table:
        rows, start = [], int(self._batch.whole.storage_offset())
        for matrix, part, whole in pieces:
            place = view_place(0, whole, int(whole.storage_offset()) - start, dtype.itemsize)
            height, width = part.shape
            rows.append(Row(height, width, matrix, 0, 0, (self._stored(part), place)))
        return Table.of(rows)

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
