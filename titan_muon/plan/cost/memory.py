"""The peak memory of a step on a rank, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..exchange.pattern import BucketTotals
from .times import Costs, OwnerTime


class StepBytes(NamedTuple):
    """Bytes that a step allocates on a rank.

    Attributes:
        workspace: the largest batch of whole matrices.
        advance, orthogonalize, apply: temporary, of the largest call or batch of the stage.
    """

    buffers: int
    workspace: int
    advance: int
    orthogonalize: int
    apply: int

    @property
    def work(self) -> int:
        """Peak without the exchange buffers: the computing stream runs the stages in turn."""
        return self.workspace + max(self.advance, self.orthogonalize, self.apply)

    @property
    def peak(self) -> int:
        return self.buffers + self.work


def step_bytes(local: OwnerTime, buckets: Sequence[BucketTotals], buffer_elements: int, costs: Costs) -> StepBytes:
    """The bytes of a rank with `local` matrices and travelling `buckets`."""
    owned = [local, *(costs.owned(bucket.owned) for bucket in buckets)]
    stored = max([local.assembled // costs.wire_bytes, *(bucket.stored for bucket in buckets)])
    passes, row = costs.passes, costs.longest_row
    return StepBytes(
        buffers=buffer_elements * costs.wire_bytes,
        workspace=max(time.assembled for time in owned),
        advance=min(stored, max(passes.advance_elements, row)) * passes.advance_bytes,
        orthogonalize=max(time.iteration for time in owned),
        apply=min(stored, max(passes.apply_elements, row)) * passes.apply_bytes,
    )
