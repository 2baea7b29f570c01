"""The walk over a plan that counts FLOPs, bytes, buffers and seconds of every rank.

The search, the timeline, the summary and the forecast of memory read its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..exchange.all_gather import PATTERNS
from ..exchange.pattern import BucketTotals
from ..exchange.phases import aligned
from ..terms.machine import MachineRates
from ..terms.slices import teams_in
from ..terms.types import Bucket, Plan
from .costs import Costs, OwnedCost

LOCAL = -1
"""Bucket and round of local matrices."""


class Share(NamedTuple):
    """A rank's share of a bucket, or its local matrices: counts, and seconds of each stage.

    Attributes:
        rank: position among all ranks of the plan.
        pack: to update the momentum and pack the stored pieces.
        copies: to assemble matrices, and to fill the return buffer.
        gather, back: of the rank's links in the gather and in the return.
    """

    rank: int
    round: int
    totals: BucketTotals
    owned: OwnedCost
    pack: float
    copies: float
    apply: float
    gather: float = 0.0
    back: float = 0.0

    @property
    def passes(self) -> float:
        return self.pack + self.copies + self.apply

    @property
    def computing(self) -> float:
        return self.owned.seconds + self.passes


class BucketCost(NamedTuple):
    """Shares of a bucket's ranks, in the order of `group`.

    Attributes:
        group: positions among all ranks of the plan.
        latency: seconds of an empty collective.
        teams: by sliced matrix, the positions of the owners, and the seconds within `owned`.
    """

    group: tuple[int, ...]
    round: int
    shares: tuple[Share, ...]
    latency: float
    teams: tuple[tuple[tuple[int, ...], float], ...] = ()


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


class PlanCost:
    """Costs of buckets and of `local` matrices. `by_rank`: each rank's shares, first of its local matrices."""

    def __init__(self, buckets: Sequence[Bucket], local: Sequence[OwnedCost], costs: Costs) -> None:
        self.costs, self.ranks = costs, costs.pieces.ranks()
        place = {rank: index for index, rank in enumerate(self.ranks)}
        self.local = [_local_share(index, owned, costs) for index, owned in enumerate(local)]
        self.buckets = [_bucket_cost(bucket, costs, place) for bucket in buckets]
        self.rounds = max((bucket.round for bucket in buckets), default=-1) + 1
        self.by_rank = [[share] for share in self.local]
        for bucket in self.buckets:
            for share in bucket.shares:
                self.by_rank[share.rank].append(share)

    @classmethod
    def from_plan(cls, plan: Plan, machine: MachineRates) -> PlanCost:
        costs = Costs.from_plan(plan, machine)
        return cls(plan.buckets, costs.local(plan.local), costs)

    def busiest(self) -> float:
        """Seconds of the rank that computes longest, without waits."""
        return max((sum(share.computing for share in shares) for shares in self.by_rank), default=0.0)

    def step_bytes(self, buffer_sets: int) -> list[StepBytes]:
        return [_step_bytes(shares, buffer_sets, self.costs) for shares in self.by_rank]


def _local_share(index: int, owned: OwnedCost, costs: Costs) -> Share:
    # Local matrices are updated batch by batch, and nothing is sent.
    stored = owned.assembled // costs.wire_bytes
    return Share(
        rank=index,
        round=LOCAL,
        totals=BucketTotals((), stored, 0, 0, (), (), 0, owned.matrices),
        owned=owned,
        pack=costs.pack_seconds(owned.elements, owned.batches) + costs.normalize_seconds(owned.elements),
        copies=0.0,
        apply=costs.apply_seconds(owned.elements, owned.batches),
    )


def _bucket_cost(bucket: Bucket, costs: Costs, place: dict[int, int]) -> BucketCost:
    pieces, machine = costs.pieces, costs.machine
    totals = PATTERNS[bucket.exchange].totals(bucket, pieces)
    across = len({pieces.node(rank) for rank in bucket.group}) > 1
    latency = machine.network.latency if across else machine.node.latency
    links = [[traffic.seconds(costs.wire_bytes, machine) for traffic in totals[rank].phases] for rank in bucket.group]
    shares = []
    for rank, (gather, *back) in zip(bucket.group, links, strict=True):
        mine, owned = totals[rank], costs.owned(totals[rank].owned)
        shares.append(
            Share(
                rank=place[rank],
                round=bucket.round,
                totals=mine,
                owned=owned,
                pack=costs.pack_seconds(mine.stored),
                copies=costs.copy_seconds(owned.elements),
                apply=costs.apply_seconds(mine.stored),
                gather=gather,
                # Phases of a return follow each other. The first has its latency in `BucketCost.latency`.
                back=sum(back) + (latency * (len(back) - 1) if any(back) else 0.0),
            )
        )
    teams = tuple(
        (tuple(place[rank] for rank in ranks), costs.owned(((pieces.kinds[first], 1),)).seconds)
        for first, ranks in teams_in(bucket, pieces.matrices).items()
    )
    return BucketCost(tuple(place[rank] for rank in bucket.group), bucket.round, tuple(shares), latency, teams)


def _step_bytes(shares: Sequence[Share], buffer_sets: int, costs: Costs) -> StepBytes:
    elementwise, row = costs.elementwise, costs.longest_row
    stored = max(share.totals.stored for share in shares)
    return StepBytes(
        buffers=_buffer_elements(shares[1:], buffer_sets) * costs.wire_bytes,
        workspace=max(share.owned.assembled for share in shares),
        advance=min(stored, max(elementwise.advance_elements, row)) * elementwise.advance_bytes,
        orthogonalize=max(share.owned.iteration for share in shares),
        apply=min(stored, max(elementwise.apply_elements, row)) * elementwise.apply_bytes,
    )


def _buffer_elements(shares: Sequence[Share], buffer_sets: int) -> int:
    # Buckets of a round need separate buffers, shared with buckets at equal positions of rounds with the same set.
    largest: dict[tuple[int, int], list[int]] = {}
    last, place = LOCAL, 0
    for share in shares:
        place = place + 1 if share.round == last else 0
        last = share.round
        key = (last % buffer_sets, place)
        largest[key] = [max(pair) for pair in zip_longest(largest.get(key, []), share.totals.buffers, fillvalue=0)]
    return sum(aligned(elements) for buffers in largest.values() for elements in buffers)
