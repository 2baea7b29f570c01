"""The peak memory of a step on one rank, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..exchange.pattern import BucketTotals
from .times import Costs, OwnerTime


class StepBytes(NamedTuple):
    """Bytes that a step allocates on one rank.

    Attributes:
        buffers: exchange buffers, in all stages.
        workspace: the largest batch of whole matrices, in all stages.
        advance: temporary bytes of the largest call for the momentum.
        orthogonalize: temporary bytes of Newton-Schulz and of the rule, on the largest batch.
        apply: temporary bytes of the largest call for the weights.
    """

    buffers: int
    workspace: int
    advance: int
    orthogonalize: int
    apply: int

    @property
    def work(self) -> int:
        """Peak bytes without the exchange buffers."""
        # The computing stream runs one stage at a time.
        return self.workspace + max(self.advance, self.orthogonalize, self.apply)

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        return self.buffers + self.work


def step_bytes(local: OwnerTime, buckets: Sequence[BucketTotals], buffer_elements: int, costs: Costs) -> StepBytes:
    """The peak of a step on one rank.

    Args:
        local: cost of the local matrices.
        buckets: totals of the buckets that travel.
        buffer_elements: elements of the exchange buffers.
        costs: costs of the plan.
    """
    owned = [local, *(costs.owned(bucket.owned) for bucket in buckets)]
    stored = max([local.assembled // costs.wire_bytes, *(bucket.stored for bucket in buckets)])
    passes, row = costs.passes, costs.longest_row
    return StepBytes(
        buffers=buffer_elements * costs.wire_bytes,
        workspace=max(each.assembled for each in owned),
        advance=min(stored, max(passes.advance_elements, row)) * passes.advance_bytes,
        orthogonalize=max(each.iteration for each in owned),
        apply=min(stored, max(passes.apply_elements, row)) * passes.apply_bytes,
    )
