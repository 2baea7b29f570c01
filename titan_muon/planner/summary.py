"""Counts of a plan, for each rank and in total: FLOPs, bytes, buffers and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..engine.layout.types import Plan
from ..options import Machine
from .machine import planning_machine
from .owners import state_totals
from .walk import PlanCost, Share, StepBytes


@dataclass(frozen=True)
class RankCost:
    """Counts of a rank in a step.

    The rank's momentum has `state_elements` elements, at most `bucket_elements` of them in one of the `buckets`. Its
    whole matrices have `owned_elements`.
    """

    rank: int
    matrices: int
    ns_flops: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
    work_bytes: int
    collectives: int
    buckets: int
    bucket_elements: int
    state_elements: int
    owned_elements: int


@dataclass(frozen=True)
class Summary:
    """Totals and maxima of a plan.

    Attributes:
        muon_matrices: over the whole world; replicas count once.
        orthogonalizations: over all ranks; above `muon_matrices` if replicas repeat work.
        collectives_per_step: on gloo an uneven all-gather runs as a broadcast per rank.
        work_bytes_max: besides exchange buffers, `StepBytes.work`.
    """

    ranks: tuple[RankCost, ...]
    muon_matrices: int
    orthogonalizations: int
    ns_flops_max: int
    bytes_sent_max: int
    collectives_per_step: int
    buffer_bytes_max: int
    work_bytes_max: int


def summarize(plan: Plan, cost: PlanCost | None = None) -> Summary:
    """Count FLOPs, bytes and collectives. `cost`: of the plan on any machine."""
    # The counts do not depend on the machine.
    cost = PlanCost.from_plan(plan, planning_machine(Machine())) if cost is None else cost
    states = state_totals(plan, cost.costs.pieces.geometries)
    memory = cost.step_bytes(max(1, min(plan.buffer_sets, plan.rounds)))
    cost_of = cache(lambda alike: _rank_cost(cost.by_class[alike], memory[alike]))
    members = zip(cost.ranks, cost.class_of, strict=True)
    ranks = [replace(cost_of(alike), rank=rank, state_elements=states[rank]) for rank, alike in members]
    return Summary(
        ranks=tuple(ranks),
        muon_matrices=len(plan.matrices),
        orthogonalizations=sum(cost.matrices for cost in ranks),
        ns_flops_max=max(cost.ns_flops for cost in ranks),
        bytes_sent_max=max(cost.bytes_sent for cost in ranks),
        collectives_per_step=max(cost.collectives for cost in ranks),
        buffer_bytes_max=max(cost.buffer_bytes for cost in ranks),
        work_bytes_max=max(cost.work_bytes for cost in ranks),
    )


def _rank_cost(shares: Sequence[Share], memory: StepBytes) -> RankCost:
    """Of any rank of a class, without momentum."""
    owned, totals = [share.owned for share in shares], [share.totals for share in shares]
    return RankCost(
        rank=0,
        matrices=sum(cost.matrices for cost in owned),
        ns_flops=sum(cost.flops for cost in owned),
        bytes_sent=sum(share.totals.sent * share.wire_bytes for share in shares),
        bytes_received=sum(share.totals.received * share.wire_bytes for share in shares),
        buffer_bytes=memory.buffers,
        work_bytes=memory.work,
        collectives=sum(total.collectives for total in totals),
        buckets=owned[0].batches + len(shares) - 1,
        bucket_elements=max(total.stored for total in totals),
        state_elements=0,
        owned_elements=sum(cost.elements for cost in owned),
    )
