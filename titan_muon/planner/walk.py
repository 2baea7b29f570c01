"""The walk over a plan that counts FLOPs, bytes, buffers and seconds of every rank.

The search, the timeline, the summary and the forecast of memory read its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeVar

from ..engine.layout.intervals import Pieces, Ranks
from ..engine.layout.types import Bucket, Matrix, Plan
from ..engine.layout.work import ElementwiseCost, Work
from ..engine.program.phases import buffer_bytes
from ..engine.program.program import batch_sizes
from .machine import BATCH_OPERATORS, FUSED_BATCH_OPERATORS, MachineRates
from .totals import BucketTotals, KindCounts, LinkTraffic, Totals

LOCAL = -1
"""Bucket and round of local matrices."""

T = TypeVar("T")

NORMALIZING_BYTES = 10
"""Bytes for an element of a whole matrix: norm (2), quotient in float16 (2 + 2), result in bfloat16 (2 + 2)."""


def copied_bytes(wire_bytes: int) -> int:
    """Bytes of an element moved to assemble matrices, to normalize them and to fill the return buffer."""
    return 2 * 2 * wire_bytes + NORMALIZING_BYTES


def link_seconds(traffic: Sequence[tuple[LinkTraffic, int]], machine: MachineRates) -> float:
    """Seconds of a rank's links in collectives, with the bytes of an element of each."""
    # Both links run concurrently, in both directions.
    sent_near, sent_far, near, far = (sum(size * part[side] for part, size in traffic) for side in range(4))
    return max(
        machine.node.seconds(max(sent_near, near), sum(part.near_peers for part, _ in traffic)),
        machine.network.seconds(max(sent_far, far), sum(part.far_peers for part, _ in traffic)),
    )


class OwnedCost(NamedTuple):
    """Cost of the matrices that a rank orthogonalizes in a bucket, or of its local matrices.

    `largest`: most elements of a batch. `assembled`, `iteration`: most bytes of a batch, assembled and in the
    iteration. `operators`: of PyTorch.
    """

    elements: int = 0
    seconds: float = 0.0
    largest: int = 0
    assembled: int = 0
    iteration: int = 0
    matrices: int = 0
    flops: int = 0
    batches: int = 0
    operators: int = 0


class Costs:
    """Seconds and bytes of a rank's matrices on a machine."""

    def __init__(
        self, pieces: Pieces, works: Sequence[Work], machine: MachineRates, elementwise: ElementwiseCost
    ) -> None:
        self.pieces, self.works, self.machine, self.elementwise = pieces, works, machine, elementwise
        self.totals = Totals(pieces)
        self.longest_row = max((pieces.matrices[example].cols for example in pieces.examples), default=0)
        # Most ranks have equal counts.
        self.owned = cache(self._sum)

    def local(self, local: Sequence[Ranks]) -> list[OwnedCost]:
        """The cost of each rank's local matrices."""
        by_kind: dict[int, dict[int, int]] = {rank: {} for rank in self.pieces.ranks()}
        for kind, ranks in zip(self.pieces.kinds, local, strict=True):
            for rank in ranks:
                by_kind[rank][kind] = by_kind[rank].get(kind, 0) + 1
        return [self.owned(tuple(sorted(kinds.items()))) for kinds in by_kind.values()]

    def latency(self, group: Ranks) -> float:
        """Seconds of an empty collective."""
        across = self.pieces.node(group[0]) != self.pieces.node(group[-1])
        return (self.machine.network if across else self.machine.node).latency

    def pack_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.elementwise.traffic
        return self.machine.pass_seconds(elements * moved.advance, calls * moved.advance_launches)

    def apply_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.elementwise.traffic
        return self.machine.pass_seconds(elements * moved.apply, calls * moved.apply_launches)

    def wire_bytes(self, matrix: int) -> int:
        """Of an element in transit."""
        return self.works[self.pieces.matrices[matrix].work].wire_bytes

    def alone(self, matrix: Matrix) -> float:
        """Seconds of a matrix in a large batch."""
        work = self.works[matrix.work]
        return work.flops / self.machine.rate(work.dtype, min(matrix.rows, matrix.cols))

    def _sum(self, counts: KindCounts) -> OwnedCost:
        total, fused = OwnedCost(), self.elementwise.traffic.fused
        for matrix, size in self._batches(counts):
            work = self.works[matrix.work]
            total = OwnedCost(
                elements=total.elements + size * matrix.numel,
                seconds=total.seconds + self.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), size),
                largest=max(total.largest, size * matrix.numel),
                assembled=max(total.assembled, size * matrix.numel * work.wire_bytes),
                iteration=max(total.iteration, size * max(work.bytes, matrix.numel * self.elementwise.finish_bytes)),
                matrices=total.matrices + size,
                flops=total.flops + size * matrix.flops,
                batches=total.batches + 1,
                operators=total.operators + work.operators + (FUSED_BATCH_OPERATORS if fused else BATCH_OPERATORS),
            )
        return total

    def _batches(self, counts: Iterable[tuple[int, int]]) -> Iterator[tuple[Matrix, int]]:
        """(example matrix, size) of each batch of `batches`."""
        equal: dict[tuple[int, int, int], tuple[Matrix, int]] = {}
        for kind, count in counts:
            matrix = self.pieces.matrices[self.pieces.examples[kind]]
            key = (matrix.rows, matrix.cols, matrix.work)
            example, earlier = equal.get(key, (matrix, 0))
            equal[key] = example, earlier + count
        for matrix, count in equal.values():
            yield from ((matrix, size) for size in batch_sizes(count, self.works[matrix.work]))


class Share(NamedTuple):
    """A rank's share of a bucket, or its local matrices: counts, and seconds of each stage.

    Attributes:
        pack: to update the momentum and pack the stored pieces.
        copies: to assemble matrices, and to fill the return buffer.
        gather, back: of the rank's links in the gather and in the return.
        wire_bytes: of an element in transit.
    """

    round: int
    totals: BucketTotals
    owned: OwnedCost
    pack: float
    copies: float
    apply: float
    gather: float = 0.0
    back: float = 0.0
    wire_bytes: int = 0

    @property
    def passes(self) -> float:
        return self.pack + self.copies + self.apply

    @property
    def computing(self) -> float:
        return self.owned.seconds + self.passes


class BucketCost(NamedTuple):
    """The share of each class of ranks in a bucket, by number as in `PlanCost.class_of`: equal numbers for a group.

    `latency`: seconds of an empty collective.
    """

    round: int
    latency: float
    shares: dict[int, Share]


class StepBytes(NamedTuple):
    """Bytes that a step allocates on a rank.

    `work`: besides exchange buffers, the largest batch of whole matrices, and temporary memory of the largest stage,
    because the computing stream runs the stages in turn.
    """

    buffers: int
    work: int

    @property
    def peak(self) -> int:
        return self.buffers + self.work


class PlanCost:
    """Costs of buckets and of `local` matrices.

    `class_of`: the class of each rank, in the order of `ranks`. Ranks of a class have equal shares of the same buckets.
    `by_class`: each class's shares, first of its local matrices.
    """

    # A rank's times follow from its shares and from times of its buckets, so ranks of a class are equal at any time. Of
    # 16,384 ranks, most own nothing.

    def __init__(self, buckets: Sequence[Bucket], local: Sequence[OwnedCost], costs: Costs) -> None:
        self.costs, self.ranks = costs, costs.pieces.ranks()
        self.rounds = max((bucket.round for bucket in buckets), default=LOCAL) + 1
        shares, keys = list[Share](), {rank: list[tuple[int, int]]() for rank in self.ranks}

        def share_out(index: int, by_rank: Iterable[tuple[int, T]], make: Callable[[T], Share]) -> None:
            known: dict[T, int] = {}
            for rank, cost in by_rank:
                number = known.setdefault(cost, len(shares))
                if number == len(shares):
                    shares.append(make(cost))
                keys[rank].append((index, number))

        share_out(LOCAL, zip(self.ranks, local, strict=True), partial(_local_share, costs))
        for index, bucket in enumerate(buckets):
            share_out(index, costs.totals.of(bucket).items(), partial(_share, costs, bucket))
        classes: dict[tuple[tuple[int, int], ...], int] = {}
        self.class_of = [classes.setdefault(tuple(key), len(classes)) for key in keys.values()]
        self.by_class = [[shares[number] for _, number in key] for key in classes]
        self.buckets = [BucketCost(b.round, costs.latency(b.group), {}) for b in buckets]
        for alike, key in enumerate(classes):
            for index, number in key[1:]:
                self.buckets[index].shares[alike] = shares[number]

    @classmethod
    def from_plan(cls, plan: Plan, machine: MachineRates) -> PlanCost:
        pieces = Pieces.from_plan(plan, plan.ranks_per_node if plan.ranks_per_node else machine.ranks_per_node)
        costs = Costs(pieces, plan.works, machine, plan.passes)
        return cls(plan.buckets, costs.local(plan.local), costs)

    def busiest(self) -> float:
        """Seconds of the rank that computes longest, without waits."""
        return max((sum(share.computing for share in shares) for shares in self.by_class), default=0.0)

    def step_bytes(self, buffer_sets: int) -> list[StepBytes]:
        """Of a rank of each class."""
        elementwise, row, result = self.costs.elementwise, self.costs.longest_row, []
        for shares in self.by_class:
            stored = max(share.totals.stored for share in shares)
            temporary = max(
                min(stored, max(elementwise.advance_elements, row)) * elementwise.advance_bytes,
                max(share.owned.iteration for share in shares),
                min(stored, max(elementwise.apply_elements, row)) * elementwise.apply_bytes,
            )
            buckets = ((share.round, share.wire_bytes, share.totals.buffers) for share in shares[1:])
            work = max(share.owned.assembled for share in shares) + temporary
            result.append(StepBytes(buffer_bytes(buckets, buffer_sets), work))
        return result


def _local_share(costs: Costs, owned: OwnedCost) -> Share:
    # Local matrices are updated batch by batch, and nothing is sent.
    normalizing = costs.machine.pass_seconds(owned.elements * NORMALIZING_BYTES)
    return Share(
        round=LOCAL,
        totals=BucketTotals((), owned.largest, 0, 0, (), (), 0),
        owned=owned,
        pack=costs.pack_seconds(owned.elements, owned.batches) + normalizing,
        copies=0.0,
        apply=costs.apply_seconds(owned.elements, owned.batches),
    )


def _share(costs: Costs, bucket: Bucket, totals: BucketTotals) -> Share:
    owned, latency = costs.owned(totals.owned), costs.latency(bucket.group)
    wire_bytes = costs.wire_bytes(bucket.matrices[0])
    links = [link_seconds([(traffic, wire_bytes)], costs.machine) for traffic in totals.phases]
    # Phases follow each other. The first has its latency in `BucketCost.latency`.
    gather, back = (
        sum(part) + (latency * (len(part) - 1) if any(part) else 0.0)
        for part in (links[: totals.hops], links[totals.hops :])
    )
    return Share(
        round=bucket.round,
        totals=totals,
        owned=owned,
        pack=costs.pack_seconds(totals.stored),
        copies=costs.machine.pass_seconds(owned.elements * copied_bytes(wire_bytes)),
        apply=costs.apply_seconds(totals.stored),
        gather=gather,
        back=back,
        wire_bytes=wire_bytes,
    )
