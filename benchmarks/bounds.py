"""Lower bounds for the same matrices: FLOPs, bytes and seconds of any plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from titan_muon.engine.layout.intervals import Pieces
from titan_muon.engine.layout.types import Bucket, Plan
from titan_muon.engine.program.patterns import PATTERNS
from titan_muon.options import Overlap
from titan_muon.planner.machine import MachineRates
from titan_muon.planner.timeline import Timeline
from titan_muon.planner.totals import LinkTraffic
from titan_muon.planner.walk import Costs, PlanCost, copied_bytes, link_seconds

HEAVY = 6
"""A matrix is heavy if a rank has time for at most this number of equal matrices."""
MOST_KINDS = 3
HALVINGS = 24


def least_flops(plan: Plan) -> int:
    """Lower bound on the busiest rank's FLOPs: the mean over ranks, or the largest matrix."""
    flops = [matrix.flops for matrix in plan.matrices]
    ranks = {rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks}
    return max(sum(flops) // len(ranks), max(flops))


def least_sent(plan: Plan) -> int:
    """Mean bytes of a rank if each matrix is owned, within its bucket, by the rank with the largest piece."""
    pieces, total = Pieces.from_plan(plan), 0
    for bucket in plan.buckets:
        wire_bytes = plan.wire_bytes(bucket)
        for kind, count in Counter(pieces.kinds[matrix] for matrix in bucket.matrices).items():
            holders = pieces.holders(kind, bucket.group)
            most = max(holders.values())
            # The owner gathers the rest of one replica, and returns to every replica all pieces but its own.
            lacking = plan.matrices[pieces.examples[kind]].numel - most
            total += count * (lacking + sum(holders.values()) - most) * wire_bytes
    return total // len(pieces.ranks())


def least_seconds(plan: Plan, machine: MachineRates, played: Timeline) -> float:
    """Lower bound on the step time with a single owner for each matrix, or slice, of the plan.

    `played`: the plan's timeline on the machine.
    """
    cost = PlanCost.from_plan(plan, machine)
    beside = [
        local.computing + sum(share.pack + (0.0 if played.overlap == "forward" else share.apply) for share in shares)
        for local, *shares in map(cost.by_class.__getitem__, cost.class_of)
    ]
    chain_counts = chains(plan.buckets, cost.costs, overlap=played.overlap)
    return max(least_whole(chain_counts, beside, played.last.seconds), played.least, played.link)


def peers_and_messages(cost: PlanCost) -> tuple[int, int]:
    """Most peers of a rank in a collective, and most messages of a rank in a step."""
    peers = [[part.near_peers + part.far_peers for s in shares for part in s.totals.phases] for shares in cost.by_class]
    return max(max(of_rank, default=0) for of_rank in peers), max(map(sum, peers))


class Chain(NamedTuple):
    """Seconds of a matrix's owner: orthogonalization with copies, gather, and return."""

    work: float
    gather: float
    scatter: float


def chains(buckets: Iterable[Bucket], costs: Costs, *, overlap: Overlap = "none") -> Counter[Chain]:
    """Matrices of buckets with owners, each with the owner nearest to the pieces.

    With `overlap` the return may take no time in the step.
    """
    groups = Counter[tuple[int, tuple[int, ...], str]]()
    for bucket in buckets:
        if PATTERNS[bucket.exchange].has_owners:
            groups.update((costs.pieces.kinds[matrix], bucket.group, bucket.exchange) for matrix in bucket.matrices)
    chain_counts = Counter[Chain]()
    hidden: Mapping[Overlap, dict[str, float]] = {"none": {}, "forward": {"scatter": 0.0}}
    for (kind, group, exchange), count in groups.items():
        chain = _chain(kind, group, costs, exchange)
        chain_counts[chain._replace(**hidden[overlap])] += count
    return chain_counts


def _chain(kind: int, group: tuple[int, ...], costs: Costs, exchange: str) -> Chain:
    pieces, machine, example = costs.pieces, costs.machine, costs.pieces.examples[kind]
    matrix, wire, holders = pieces.matrices[example], costs.wire_bytes(example), pieces.holders(kind, group)
    gather, scatter = [], []
    replica, everywhere = (costs.totals.amounts(kind, group, by_replica=by_replica) for by_replica in (True, False))
    for rank, mine in holders.items():
        ((part, _), (part_near, _)), ((total, _), (total_near, _)) = replica.around(rank), everywhere.around(rank)
        # In two hops all links of the owner's node receive a part.
        links = pieces.ranks_per_node if exchange == "two_hops" else 1
        way = link_seconds([(LinkTraffic(0, 0, part_near - mine, (part - part_near) // links), wire)], machine)
        gather.append(way)
        # Replicas share results, so the owner sends only what it received. The replicas' own traffic depends on other
        # decisions and is left out.
        scatter.append(
            way
            if exchange in ("hierarchical", "two_hops")
            else link_seconds([(LinkTraffic(total_near - mine, total - total_near, 0, 0), wire)], machine)
        )
    work = costs.alone(matrix) + matrix.numel * copied_bytes(wire) / machine.memory
    return Chain(work, min(gather), min(scatter))


def least_whole(chain_counts: Mapping[Chain, int], beside: Sequence[float], enough: float) -> float:
    """Lower bound on the step time in seconds if each matrix is whole on one rank.

    `beside`: seconds of each rank's momentum, apply, and local matrices. `enough`: time of a known step.
    """
    ranks, least = len(beside), min(beside)
    low = (sum(chain.work * count for chain, count in chain_counts.items()) + sum(beside)) / ranks
    high = max(low, enough)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _too_short(middle, chain_counts, ranks, least):
            low = middle
        else:
            high = middle
    return low


def _too_short(seconds: float, chain_counts: Mapping[Chain, int], ranks: int, beside: float) -> bool:
    """Whether `ranks` ranks cannot orthogonalize all matrices in `seconds`."""
    # Assign each matrix a weight so that one rank's feasible set weighs at most W. Then R ranks handle at most R * W. A
    # matrix weighs 1 / n if a rank can orthogonalize at most n equal matrices. Try the heaviest kinds, from one kind to
    # MOST_KINDS.
    heavy = sorted((chain for chain in chain_counts if HEAVY * chain.work >= seconds), reverse=True)[:MOST_KINDS]
    for count in range(1, len(heavy) + 1):
        kinds = heavy[:count]
        most = [_times(kind, seconds, beside) for kind in kinds]
        if 0 in most:
            return True
        choices = product(*(range(times + 1) for times in most))
        room = max(
            sum(n / times for n, times in zip(counts, most, strict=True))
            for counts in choices
            if _seconds(kinds, counts, beside) <= seconds
        )
        if sum(chain_counts[kind] / times for kind, times in zip(kinds, most, strict=True)) > ranks * room * (1 + 1e-9):
            return True
    return False


def _times(kind: Chain, seconds: float, beside: float) -> int:
    """Number of matrices of a kind for one rank in `seconds`."""
    count = 0
    while count < HEAVY and _seconds([kind], [count + 1], beside) <= seconds:
        count += 1
    return count


def _seconds(kinds: Sequence[Chain], counts: Sequence[int], beside: float) -> float:
    """Lower bound on the time of a rank with at least `counts` matrices of `kinds`."""
    # The first matrix waits for a gather, and the last for a return. Other computation may hide both.
    present = [(index, kind) for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)) if count]
    ways = [
        first.gather + last.scatter
        for i, first in present
        for j, last in present
        if i != j or counts[i] > 1 or len(present) == 1
    ]
    work = sum(count * kind.work for kind, count in zip(kinds, counts, strict=True))
    return work + max(beside, min(ways, default=0.0))
