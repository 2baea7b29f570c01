"""Batches of matrices on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..comm.buffers import BucketBuffers
from ..orthogonalize import DTYPES, Iteration, Method, frobenius_norms, orthogonalize
from .foreach import Copies


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, orthogonalized together.

    Attributes:
        whole: (count, rows, cols) assembled matrices, then the results, in memory shared by all batches of a rank.
        parameters: (count,) parameter indices, on the device.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    parameters: Tensor
    iteration: Iteration
    method: Method

    def norms(self) -> Tensor:
        return frobenius_norms(self.whole, DTYPES[self.method.dtype])

    def orthogonalize(self, norms: Tensor) -> None:
        """Replace U S Vᵀ by approximately U Vᵀ. `norms`: (count,) Frobenius norms."""
        orthogonalize(self.whole, self.iteration, self.method, norms=norms, out=self.whole)


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """A batch whose flagged matrices are zero, so that they get no update and rules keep their states.

    Attributes:
        numbers: (count,) places of the matrices in `flags`, on the device.
        flags: positive for a matrix to zero, on the device.
    """

    inner: Batch
    numbers: Tensor
    flags: Tensor

    def norms(self) -> Tensor:
        flagged = self.flags[self.numbers] > 0
        # Reading a flag on the CPU does not wait.
        if flagged.device.type != "cpu" or flagged.any():
            self.whole.masked_fill_(flagged[:, None, None], 0)
        return self.inner.norms()

    def orthogonalize(self, norms: Tensor) -> None:
        self.inner.orthogonalize(norms)


def assembling(batch: Batch, buffers: BucketBuffers) -> Copies:
    """Gathered pieces into whole matrices."""
    return Copies.of(
        (batch.whole[place][span.whole], source.view[span.piece])
        for place, matrix in enumerate(batch.matrices)
        for source in buffers.sources[matrix]
        for span in source.spans
    )


def splitting(batch: Batch, buffers: BucketBuffers) -> Copies:
    """Orthogonalized matrices into the pieces to return."""
    return Copies.of(
        (target.view[span.piece], batch.whole[place][span.whole])
        for place, matrix in enumerate(batch.matrices)
        for target in buffers.targets[matrix]
        for span in target.spans
    )
