"""The tensors of a bucket's calls, as a step uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..orthogonalize import DTYPES, Iteration, Method, frobenius_norms, orthogonalize
from .foreach import Copies, MomentumCall, UpdateCall


@dataclass(frozen=True)
class BatchPart:
    """Matrices of a batch with one parameter group and orientation. `states`: by name, a tensor for each matrix."""

    whole: Tensor
    group: Mapping[str, Any]
    transposed: bool
    states: Mapping[str, Sequence[Tensor]]

    def stacked(self) -> dict[str, Tensor]:
        """(count, ...) states. A single state, which may be as large as a matrix, is a view."""
        return {
            name: torch.stack(list(states)) if len(states) > 1 else states[0][None]
            for name, states in self.states.items()
        }

    def store(self, stacked: Mapping[str, Tensor]) -> None:
        for name, states in self.states.items():
            if len(states) > 1:
                torch._foreach_copy_(list(states), list(stacked[name].unbind()))


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, orthogonalized together.

    Attributes:
        whole: (count, rows, cols) assembled matrices, then the results, in memory shared by all batches of a rank.
        parameters, on_device: (count,) parameter indices, on the host and on the device.
        place: of the first matrix among the rank's batches.
        parts: with the states of the algorithm, if it has any.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    parameters: tuple[int, ...]
    on_device: Tensor
    place: int
    iteration: Iteration
    method: Method
    parts: tuple[BatchPart, ...]

    def norms(self) -> Tensor:
        return frobenius_norms(self.whole, DTYPES[self.method.dtype])

    def orthogonalize(self, norms: Tensor) -> None:
        """Replace U S Vᵀ by approximately U Vᵀ. `norms`: (count,) Frobenius norms."""
        orthogonalize(self.whole, self.iteration, self.method, norms, out=self.whole)


@dataclass(frozen=True)
class UpdateBounds:
    """The largest Frobenius norms of arriving updates, (count,) float32.

    `views` are parts of `memory`. `parameters`: (count,), on the device.
    """

    memory: Tensor
    views: tuple[Tensor, ...]
    parameters: Tensor
    norms: Tensor


@dataclass(frozen=True)
class BucketViews:
    """The calls of a bucket.

    Attributes:
        index: of the bucket in the program.
        gathers: on the parts that this rank stores, before the gather.
        repeats: copies of packed shards for further ranks.
        batches: copies of gathered pieces into whole matrices, the matrices, and copies of results into pieces.
        updates: on the parts that this rank stores, after the return.
        cleared: buffer to zero before splitting results, or None.
        releases: parameters to release after packing.
        late: whether a forward does the updates, on another stream.
    """

    index: int
    gathers: tuple[MomentumCall, ...]
    repeats: Copies
    batches: tuple[tuple[Copies, Batch, Copies], ...]
    updates: tuple[UpdateCall, ...]
    cleared: Tensor | None
    releases: tuple[int, ...]
    bounds: UpdateBounds
    late: bool = False
