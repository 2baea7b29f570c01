"""Counts of a plan, for each rank and in total: FLOPs, bytes, buffers and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import Machine
from .cost.memory import step_bytes
from .cost.times import Costs, OwnerTime
from .cost.totals import Totals
from .search.state import state_elements
from .terms.layout import Geometries
from .terms.machine import machine_of
from .terms.pieces import Pieces
from .terms.types import Plan


@dataclass(frozen=True)
class RankCost:
    """Counts of a rank in a step. `matrices` includes slices.

    Offloaded momentum (`state_elements`) is streamed in `loads` loads of at most `load_elements` elements.
    """

    rank: int
    matrices: int
    ns_flops: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
    work_bytes: int
    collectives: int
    loads: int
    load_elements: int
    state_elements: int


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


def summarize(plan: Plan) -> Summary:
    """Count FLOPs, bytes and collectives."""
    geometries = Geometries(plan.parameters)
    pieces = Pieces(plan.matrices, geometries)
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine_of(Machine()), plan.passes)
    totals, states = Totals(plan.buckets, pieces), state_elements(plan)
    ranks = tuple(
        _rank_cost(rank, local.owned, totals, plan, costs, sum(states[rank].values()))
        for rank, local in costs.local(plan.local).items()
    )
    further = len(plan.matrices) - plan.whole_matrices
    return Summary(
        ranks=ranks,
        muon_matrices=plan.whole_matrices,
        # Slices are in a single group, with an owner each.
        orthogonalizations=sum(cost.matrices for cost in ranks) - further,
        ns_flops_max=max(cost.ns_flops for cost in ranks),
        bytes_sent_max=max(cost.bytes_sent for cost in ranks),
        collectives_per_step=max(cost.collectives for cost in ranks),
        buffer_bytes_max=max(cost.buffer_bytes for cost in ranks),
        work_bytes_max=max(cost.work_bytes for cost in ranks),
    )


def _rank_cost(rank: int, local: OwnerTime, totals: Totals, plan: Plan, costs: Costs, kept: int) -> RankCost:
    buckets = [bucket for _, bucket in totals.buckets[rank]]
    owned = [local, *(costs.owned(bucket.owned) for bucket in buckets)]
    sliced_bytes = sum(owner.team_sent for owner in owned)
    elements = totals.buffer_elements(rank, max(1, min(plan.buffer_sets, plan.rounds)))
    memory = step_bytes(local, buckets, elements, costs)
    return RankCost(
        rank=rank,
        matrices=sum(owner.matrices for owner in owned),
        ns_flops=sum(owner.flops for owner in owned),
        bytes_sent=sum(bucket.sent for bucket in buckets) * plan.wire_bytes + sliced_bytes,
        bytes_received=sum(bucket.received for bucket in buckets) * plan.wire_bytes + sliced_bytes,
        buffer_bytes=memory.buffers,
        work_bytes=memory.work,
        collectives=sum(bucket.collectives for bucket in buckets) + sum(owner.team_calls for owner in owned),
        loads=local.batches + len(buckets),
        load_elements=max([local.assembled // plan.wire_bytes, *(bucket.stored for bucket in buckets)]),
        state_elements=kept,
    )
