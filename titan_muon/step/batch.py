"""Matrices of this rank that are orthogonalized together, and the copies that make them whole and part them again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..comm.buffers import BucketBuffers
from ..orthogonalize import DTYPES, Iteration, Method, frobenius_norms, orthogonalize
from .foreach import Copies


@dataclass(frozen=True)
class Batch:
    """Matrices of this rank that are orthogonalized together.

    Attributes:
        matrices: their indices in the plan.
        whole: (count, rows, cols) tensor in which they are made whole, and which the results are written over; all
            batches take turns in one memory.
        parameters: (count,) indices of their parameters, on the device.
        iteration: Newton-Schulz iteration that is computed.
        method: algorithm that computes it.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    parameters: Tensor
    iteration: Iteration
    method: Method

    def norms(self) -> Tensor:
        """The Frobenius norm of each matrix, (count,)."""
        return frobenius_norms(self.whole, DTYPES[self.method.dtype])

    def orthogonalize(self, norms: Tensor) -> None:
        """Replace the matrices, whose norms are known, by approximately U Vᵀ of each."""
        orthogonalize(self.whole, self.iteration, self.method, norms=norms, out=self.whole)


def assembling(batch: Batch, buffers: BucketBuffers) -> Copies:
    """What copies the pieces that were gathered into whole matrices."""
    return Copies.of(
        (batch.whole[place][span.whole], source.view[span.piece])
        for place, matrix in enumerate(batch.matrices)
        for source in buffers.sources[matrix]
        for span in source.spans
    )


def parting(batch: Batch, buffers: BucketBuffers) -> Copies:
    """What copies orthogonalized matrices into the pieces that go back."""
    return Copies.of(
        (target.view[span.piece], batch.whole[place][span.whole])
        for place, matrix in enumerate(batch.matrices)
        for target in buffers.targets[matrix]
        for span in target.spans
    )
