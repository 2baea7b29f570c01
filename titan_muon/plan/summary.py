"""What a plan costs, in numbers: for each rank and in total."""

from __future__ import annotations

from dataclasses import dataclass

from .buckets import longest_path
from .layout import Geometries
from .ledger import Ledger
from .types import Plan


@dataclass(frozen=True)
class RankCost:
    """What one rank does in a step; FLOPs are of Newton-Schulz, bytes are to and from other ranks."""

    rank: int
    matrices: int
    ns_flops: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
    work_bytes: int
    collectives: int


@dataclass(frozen=True)
class Summary:
    """A plan in numbers.

    Attributes:
        muon_matrices: matrices over the whole world, copies counted once.
        orthogonalizations: matrices orthogonalized over all ranks; more than `muon_matrices` if replicas repeat work.
        ns_flops_max: FLOPs on the longest path through the step, see `buckets.longest_path`.
        ns_flops_lower_bound: no plan is faster: the mean over ranks, or the largest matrix.
        bytes_sent_max: of the rank that sends most.
        bytes_sent_lower_bound: mean over ranks if each matrix met at the rank that has most of it.
        padding_bytes: sent and not part of any matrix.
        collectives_per_step: launched by the rank that launches most. On gloo, which gathers equal parts only, an
            all-gather of unequal ones is as many broadcasts as ranks.
        buffer_bytes_max: exchange buffers of the rank that has most, allocated once.
        work_bytes_max: of the rank that needs most to make its largest stack of matrices whole (allocated once) and to
            orthogonalize it (in each step).
        fallbacks: matrices that run otherwise than asked for.
    """

    ranks: tuple[RankCost, ...]
    muon_matrices: int
    orthogonalizations: int
    ns_flops_max: int
    ns_flops_lower_bound: int
    bytes_sent_max: int
    bytes_sent_lower_bound: int
    padding_bytes: int
    collectives_per_step: int
    buffer_bytes_max: int
    work_bytes_max: int
    fallbacks: int


def summarize(plan: Plan) -> Summary:
    """Count everything that the plan will do."""
    geometries = Geometries(plan.parameters)
    ledger = Ledger(plan.matrices, geometries)
    for index, at_home in enumerate(plan.home):
        for rank in at_home:
            ledger.add_home(index, rank)
    path, _ = longest_path(plan.buckets, plan.matrices, dict(ledger.flops), plan.slots)
    for bucket in plan.buckets:
        ledger.add(bucket)
    ranks = tuple(_rank_cost(rank, ledger, plan) for rank in ledger.ranks)
    once = sum(matrix.flops for matrix in plan.matrices)
    return Summary(
        ranks=ranks,
        muon_matrices=len(plan.matrices),
        orthogonalizations=sum(cost.matrices for cost in ranks),
        ns_flops_max=path,
        ns_flops_lower_bound=max(once // len(ranks), max(matrix.flops for matrix in plan.matrices)),
        bytes_sent_max=max(cost.bytes_sent for cost in ranks),
        bytes_sent_lower_bound=_least_sent(plan, geometries) // len(ranks),
        padding_bytes=0,
        collectives_per_step=max(cost.collectives for cost in ranks),
        buffer_bytes_max=max(cost.buffer_bytes for cost in ranks),
        work_bytes_max=max(cost.work_bytes for cost in ranks),
        fallbacks=0,
    )


def _rank_cost(rank: int, ledger: Ledger, plan: Plan) -> RankCost:
    whole, iteration = ledger.stacked(rank, plan.works)
    return RankCost(
        rank=rank,
        matrices=ledger.matrices[rank],
        ns_flops=ledger.flops[rank],
        bytes_sent=ledger.sent[rank] * plan.wire_bytes,
        bytes_received=ledger.received[rank] * plan.wire_bytes,
        buffer_bytes=ledger.buffer(rank, max(1, min(plan.slots, plan.rounds))) * plan.wire_bytes,
        work_bytes=whole * plan.wire_bytes + iteration,
        collectives=ledger.collectives[rank],
    )


def _least_sent(plan: Plan, geometries: Geometries) -> int:
    """Bytes over all ranks if the rank with the largest piece of each matrix were its owner, in each bucket."""
    total = 0
    for bucket in plan.buckets:
        members = frozenset(bucket.group)
        for index in bucket.matrices:
            matrix = plan.matrices[index]
            elements = geometries[matrix.parameter].elements(matrix.block)
            stored = [count for rank, count in elements.items() if rank in members]
            total += (matrix.numel - max(stored)) + (sum(stored) - max(stored))
    return total * plan.wire_bytes
