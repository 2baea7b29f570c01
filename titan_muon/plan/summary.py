"""What a plan costs, in numbers: for each rank and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..options import Machine
from .cost.memory import step_bytes
from .cost.times import Costs, OwnerTime
from .cost.totals import Totals
from .program import workers
from .search.state import state_elements
from .terms.layout import Geometries
from .terms.machine import machine_of
from .terms.pieces import Pieces
from .terms.types import Plan


@dataclass(frozen=True)
class RankCost:
    """What one rank does in a step; FLOPs are of Newton-Schulz, bytes are to and from other ranks.

    `matrices` counts those whole and slices of others.

    It keeps `state_elements` of momentum, which is advanced in `loads`, of `load_elements` at most: what offloaded
    momentum comes to the device in.
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
    rule_state_bytes: int


@dataclass(frozen=True)
class Summary:
    """A plan in numbers.

    Attributes:
        ranks: costs of each rank.
        muon_matrices: matrices over the whole world, copies counted once.
        orthogonalizations: matrices orthogonalized over all ranks; more than `muon_matrices` if replicas repeat work.
        ns_flops_max: FLOPs of the rank that has most of them.
        bytes_sent_max: bytes of the rank that sends most.
        collectives_per_step: calls of the rank that launches most. On gloo, which gathers equal parts only, an
            all-gather of unequal ones is as many broadcasts as ranks.
        buffer_bytes_max: exchange buffers of the rank that has most, allocated once.
        work_bytes_max: most bytes of any rank in a step besides exchange buffers, `StepBytes.work`.
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
    """Count everything that the plan will do."""
    geometries = Geometries(plan.parameters)
    pieces = Pieces(plan.matrices, geometries)
    # Counts are the same on any machine.
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine_of(Machine()), plan.passes)
    totals, states, of_rule = Totals(plan.buckets, pieces), state_elements(plan), rule_state_bytes(plan, geometries)
    ranks = tuple(
        _rank_cost(rank, local.owned, totals, plan, costs, sum(states[rank].values()), of_rule.get(rank, 0))
        for rank, local in costs.local(plan.local).items()
    )
    further = len(plan.matrices) - plan.whole_matrices
    return Summary(
        ranks=ranks,
        muon_matrices=plan.whole_matrices,
        # One group alone has slices, and each of them one owner.
        orthogonalizations=sum(cost.matrices for cost in ranks) - further,
        ns_flops_max=max(cost.ns_flops for cost in ranks),
        bytes_sent_max=max(cost.bytes_sent for cost in ranks),
        collectives_per_step=max(cost.collectives for cost in ranks),
        buffer_bytes_max=max(cost.buffer_bytes for cost in ranks),
        work_bytes_max=max(cost.work_bytes for cost in ranks),
    )


def rule_state_bytes(plan: Plan, geometries: Geometries) -> Mapping[int, int]:
    """Bytes of the rule's states by rank, see `Passes.states`."""
    counts = Counter[int]()
    for number, ranks in enumerate(workers(plan, geometries)) if plan.passes.states else ():
        for rank in ranks:
            counts[rank] += 4 * plan.passes.states * plan.out_in(number)[0]
    return counts


def _rank_cost(
    rank: int, local: OwnerTime, totals: Totals, plan: Plan, costs: Costs, kept: int, of_rule: int
) -> RankCost:
    buckets = [bucket for _, bucket in totals.buckets[rank]]
    owned = [local, *(costs.owned(bucket.owned) for bucket in buckets)]
    shared = sum(one.team_sent for one in owned)
    elements = totals.buffer_elements(rank, max(1, min(plan.buffer_sets, plan.rounds)))
    memory = step_bytes(local, buckets, elements, costs)
    return RankCost(
        rank=rank,
        matrices=sum(one.matrices for one in owned),
        ns_flops=sum(one.flops for one in owned),
        bytes_sent=sum(bucket.sent for bucket in buckets) * plan.wire_bytes + shared,
        bytes_received=sum(bucket.received for bucket in buckets) * plan.wire_bytes + shared,
        buffer_bytes=memory.buffers,
        work_bytes=memory.work,
        collectives=sum(bucket.collectives for bucket in buckets) + sum(one.team_calls for one in owned),
        loads=local.batches + len(buckets),
        load_elements=max([local.assembled // plan.wire_bytes, *(bucket.stored for bucket in buckets)]),
        state_elements=kept,
        rule_state_bytes=of_rule,
    )
