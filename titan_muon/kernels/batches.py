"""Newton-Schulz of a batch between kernels: two assemble and normalize the matrices, one writes the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..engine.orthogonalize import DTYPES, iterate_normalized, start_norm
from ..engine.orthogonalize.newton_schulz import plain
from ..engine.step.algorithm import Algorithm
from ..engine.step.context import StepContext
from ..engine.step.views import Batch, pieces_of
from .launch import TableLaunch
from .tables import Row, Table, ViewPlace, view_place

PARTS = 128
"""Partial sums of the squares of a matrix."""

BatchPiece = tuple[int, Tensor, Tensor]
"""A matrix of the batch, a part in a buffer, and its place in the batch."""


def takes_batch(rank: StepContext, batch: Batch, algorithm: Algorithm) -> bool:
    """Whether kernels run a batch: the reference keeps torch's bits, and some algorithms and masks change matrices."""
    names = "update", "prepare", "orthogonalize"
    changes = any(getattr(type(algorithm), name) is not getattr(Algorithm, name) for name in names)
    method = rank.methods[rank.plan.matrices[batch.matrices[0]].work]
    return not (changes or algorithm.sums_norms or rank.options.idle == "hold" or method.algorithm == "reference")


class BatchLaunches:
    """Assembles, orthogonalizes and splits a batch. `stored`: the place of a view; `flags`: word of the first flag."""

    def __init__(
        self,
        rank: StepContext,
        bucket: int,
        batch: Batch,
        algorithm: Algorithm,
        stored: Callable[[Tensor], ViewPlace],
        flags: int,
    ) -> None:
        first, count = rank.plan.matrices[batch.matrices[0]], len(batch.matrices)
        iteration, method = rank.iterations[first.parameter], rank.methods[first.work]
        self._batch, self._algorithm, self._stored = batch, algorithm, stored
        self._eps, self._steps, self._runs = iteration.eps, iteration.steps, method.runs(len(iteration.steps))
        self._product, self._dtype = method.product or plain, DTYPES[method.dtype]
        buffers = rank.buffers.buckets[bucket]
        if buffers is None:
            # Local matrices are packed into the batch.
            sources = targets = [(place, whole, whole) for place, whole in enumerate(batch.whole)]
        else:
            sources, targets = (list(pieces_of(batch, pieces)) for pieces in (buffers.sources, buffers.targets))
            # An all-gather brings the piece of each replica, and a norm needs each element once.
            sources = list({(piece[2].storage_offset(), piece[2].shape): piece for piece in sources}.values())
        assert sum(part.numel() for _, part, _ in sources) == batch.whole.numel(), "a norm needs each element once"
        wire = batch.whole.dtype
        # States change results in the wire's dtype.
        returned = wire if batch.parts else self._dtype
        pieces, results = self._table(sources, self._dtype), self._table(targets, returned)
        # Tiles are in the order of matrices.
        ends = [0, *torch.bincount(pieces.rows[pieces.tiles, 3], minlength=count).cumsum(0).tolist()]
        words = [(*pair, flags + parameter) for pair, parameter in zip(pairwise(ends), batch.parameters, strict=True)]
        self._matrices = rank.on_device(torch.tensor(words, dtype=torch.int32, device="cpu"))
        self._parts = torch.empty(count, PARTS, dtype=torch.float32, device=rank.device)
        pieces, results = pieces.on(rank.on_device), results.on(rank.on_device)
        dtypes = {"PIECE": wire, "X": self._dtype}
        norms = {"ROUNDED": wire == self._dtype == torch.bfloat16, "PARTS": PARTS}
        self._sums = TableLaunch("norm_parts", pieces, {"PIECE": wire, "PARTS": PARTS}, (PARTS, count))
        self._normalize = TableLaunch("normalize", pieces, dtypes | norms)
        self._split = TableLaunch("split", results, {"PIECE": wire, "X": returned})

    def _table(self, pieces: Iterable[BatchPiece], dtype: torch.dtype) -> Table:
        rows, start = [], int(self._batch.whole.storage_offset())
        for matrix, part, whole in pieces:
            place = view_place(0, whole, int(whole.storage_offset()) - start, dtype.itemsize)
            height, width = part.shape
            rows.append(Row(height, width, matrix, 0, 0, (self._stored(part), place)))
        return Table.of(rows)

    def run(self, vector: Tensor, words: Sequence[int] | None) -> None:
        """`vector`, `words`: as of a launch."""
        batch, dtype = self._batch, self._dtype
        whole, broken = batch.whole, batch.broken.view(torch.int8)
        same_size = whole.element_size() == dtype.itemsize
        x = whole.view(dtype) if same_size else torch.empty(whole.shape, dtype=dtype, device=whole.device)
        self._sums.run(vector, words, self._matrices, self._parts)
        self._normalize.run(vector, words, self._matrices, self._parts, broken, x, self._eps, start_norm(dtype))
        x = iterate_normalized(x, torch.empty_like(x), self._steps, self._runs, self._product)
        if batch.parts:
            x = whole.copy_(x)
        for part in batch.parts:
            states: dict[str, Any] = part.stacked()
            self._algorithm.rescale(part.whole, states, part.group, transposed=part.transposed)
            part.store(states)
        self._split.run(vector, words, x)
