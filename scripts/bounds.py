"""Lower bounds of a plan: the least FLOPs, bytes and seconds of any plan for the same matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from titan_muon.options import Overlap
from titan_muon.plan import Plan
from titan_muon.plan.cost.timeline import Timeline
from titan_muon.plan.cost.times import Costs, bucket_times
from titan_muon.plan.exchange.all_gather import PATTERNS
from titan_muon.plan.exchange.pattern import Flow
from titan_muon.plan.terms.layout import Geometries
from titan_muon.plan.terms.machine import MachineRates
from titan_muon.plan.terms.pieces import Pieces
from titan_muon.plan.terms.types import Bucket

HEAVY = 6
"""A matrix is heavy if a rank has no time for more than so many of it."""
MOST_KINDS = 3
HALVINGS = 24


def least_flops(plan: Plan) -> int:
    """FLOPs that the busiest rank of any plan has: the mean over ranks, or the largest matrix."""
    flops = [matrix.flops for matrix in plan.matrices]
    ranks = {rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks}
    return max(sum(flops) // len(ranks), max(flops))


def least_sent(plan: Plan) -> int:
    """Mean bytes of a rank if each matrix is owned, in its bucket, by the rank with the largest piece of it."""
    pieces, total = Pieces(plan.matrices, Geometries(plan.parameters)), 0
    for bucket in plan.buckets:
        for kind, count in Counter(pieces.kinds[matrix] for matrix in bucket.matrices).items():
            holders = pieces.holders(kind, bucket.group)
            most = max(holders.on_rank.values())
            # The owner gathers the rest of one replica, and returns to every replica all that it does not store itself.
            lacking = plan.matrices[pieces.examples[kind]].numel - most
            total += count * (lacking + holders.total - most)
    return total * plan.wire_bytes // len(pieces.ranks())


def least_seconds(plan: Plan, machine: MachineRates, played: Timeline) -> float:
    """Seconds of the fastest step in which one rank orthogonalizes each matrix of the plan, or each slice of one.

    `played` is the plan's own timeline on the machine.
    """
    pieces = Pieces(plan.matrices, Geometries(plan.parameters), machine.ranks_per_node)
    costs = Costs(pieces, plan.works, plan.wire_bytes, machine, plan.passes)
    place = {rank: index for index, rank in enumerate(pieces.ranks())}
    beside = [home.seconds for home in costs.local(plan.local).values()]
    for bucket in plan.buckets:
        times = bucket_times(bucket, PATTERNS[bucket.exchange].totals(bucket, pieces), costs, place)
        for index, pack, apply in zip(times.group, times.pack, times.apply, strict=True):
            beside[index] += pack + (0.0 if played.overlap == "forward" else apply)
    found = chains(plan.buckets, costs, overlap=played.overlap)
    return max(least_whole(found, beside, played.last.seconds), played.least, played.link)


class Chain(NamedTuple):
    """A matrix as its owner sees it: seconds to orthogonalize and copy it, and of its ways to the owner and back."""

    work: float
    there: float
    back: float


def chains(buckets: Iterable[Bucket], costs: Costs, *, overlap: Overlap = "none") -> Counter[Chain]:
    """The matrices of buckets that have owners, each with the owner that is nearest to its pieces.

    With `overlap` any of them may be there before the step, or return after it.
    """
    groups = Counter[tuple[int, tuple[int, ...], bool]]()
    for bucket in buckets:
        if (pattern := PATTERNS[bucket.exchange]).has_owners:
            groups.update((costs.pieces.kinds[matrix], bucket.group, pattern.spreads) for matrix in bucket.matrices)
    found = Counter[Chain]()
    hidden: Mapping[Overlap, dict[str, float]] = {"none": {}, "backward": {"there": 0.0}, "forward": {"back": 0.0}}
    for (kind, group, spreads), count in groups.items():
        chain = _chain(kind, group, costs, spreads=spreads)
        found[chain._replace(**hidden[overlap])] += count
    return found


def _chain(kind: int, group: tuple[int, ...], costs: Costs, *, spreads: bool) -> Chain:
    pieces, machine, wire = costs.pieces, costs.machine, costs.wire_bytes
    matrix, holders = pieces.matrices[pieces.examples[kind]], pieces.holders(kind, group)
    there, back = [], []
    for _, mine, node, replica in holders.found:
        part, here = holders.of_part[replica, node], holders.on_node[node]
        way = Flow(0, 0, part - mine, holders.of_replica[replica] - part).seconds(wire, machine)
        there.append(way)
        # Where copies share results the owner sends what it got. Their own way takes more, by how much others decide.
        back.append(way if spreads else Flow(here - mine, holders.total - here, 0, 0).seconds(wire, machine))
    work = costs.alone(matrix) + costs.copied_bytes(matrix.numel) / machine.memory
    return Chain(work, min(there), min(back))


def least_whole(found: Mapping[Chain, int], beside: Sequence[float], enough: float) -> float:
    """Seconds that no step can be below in which each of these matrices is whole on one rank.

    `beside` is what each rank computes besides: momentum, apply, and what it stores whole. `enough` are the seconds of
    a step that there is.
    """
    ranks, least = len(beside), min(beside)
    low = (sum(chain.work * count for chain, count in found.items()) + sum(beside)) / ranks
    high = max(low, enough)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _too_short(middle, found, ranks, least):
            low = middle
        else:
            high = middle
    return low


def _too_short(seconds: float, found: Mapping[Chain, int], ranks: int, beside: float) -> bool:
    """Whether so many ranks cannot do all of these matrices in time."""
    # Weights for matrices, such that what one rank can do in time has at most some weight: then all ranks can do no
    # more than that times their number. A matrix that a rank can do n times, and no other beside, weighs 1 / n. With
    # the heaviest kinds alone, and with more of them: any of these may be what does not fit.
    heavy = sorted((chain for chain in found if HEAVY * chain.work >= seconds), reverse=True)[:MOST_KINDS]
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
        if sum(found[kind] / times for kind, times in zip(kinds, most, strict=True)) > ranks * room * (1 + 1e-9):
            return True
    return False


def _times(kind: Chain, seconds: float, beside: float) -> int:
    """How many matrices of one kind a rank can do in time."""
    count = 0
    while count < HEAVY and _seconds([kind], [count + 1], beside) <= seconds:
        count += 1
    return count


def _seconds(kinds: Sequence[Chain], counts: Sequence[int], beside: float) -> float:
    """The least time of a rank with so many matrices of these kinds, and maybe others."""
    # It begins with one of them and ends with another. Others may come before and after, but none of these is there
    # before its own way is over. What is computed besides hides behind the ways, as far as they are long enough.
    present = [(index, kind) for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)) if count]
    ways = [
        first.there + last.back
        for i, first in present
        for j, last in present
        if i != j or counts[i] > 1 or len(present) == 1
    ]
    work = sum(count * kind.work for kind, count in zip(kinds, counts, strict=True))
    return work + max(beside, min(ways, default=0.0))
