"""What a plan costs, in numbers: for each rank and in total."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .buckets import longest_path
from .layout import Geometries
from .types import Bucket, Plan


@dataclass(frozen=True)
class RankCost:
    """What one rank does in a step; FLOPs are of Newton-Schulz, bytes are to and from other ranks."""

    rank: int
    matrices: int
    ns_flops: int
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
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
        bytes_sent_lower_bound: mean over ranks if each matrix went to the rank that has most of it.
        padding_bytes: sent and not part of any matrix.
        collectives_per_step: launched by the rank that launches most. On gloo, which gathers equal parts only, an
            all-gather of unequal ones is as many broadcasts as ranks.
        buffer_bytes_max: exchange buffers of the rank that has most.
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
    fallbacks: int


def summarize(plan: Plan) -> Summary:
    """Count everything that the plan will do."""
    geometries = Geometries(plan.parameters)
    ledger = _Ledger(plan, geometries)
    for bucket in plan.buckets:
        ledger.add(bucket)
    home = [(index, rank) for index, ranks in enumerate(plan.home) for rank in ranks]
    load = dict.fromkeys(ledger.ranks, 0)
    for index, rank in home:
        load[rank] += plan.matrices[index].flops
        ledger.matrices[rank] += 1
        ledger.flops[rank] += plan.matrices[index].flops
    path, _ = longest_path(plan.buckets, plan.matrices, load, plan.slots)
    ranks = tuple(ledger.cost(rank) for rank in ledger.ranks)
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
        fallbacks=0,
    )


class _Ledger:
    """Adds up buckets by rank."""

    def __init__(self, plan: Plan, geometries: Geometries) -> None:
        self.plan = plan
        self.geometries = geometries
        self.ranks = sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})
        self.matrices = dict.fromkeys(self.ranks, 0)
        self.flops = dict.fromkeys(self.ranks, 0)
        self.sent = dict.fromkeys(self.ranks, 0)
        self.received = dict.fromkeys(self.ranks, 0)
        self.collectives = dict.fromkeys(self.ranks, 0)
        self.buffers: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in self.ranks}

    def cost(self, rank: int) -> RankCost:
        slots = min(self.plan.slots, len(self.buffers[rank]))
        # A slot has three buffers, each as large as the largest of the buckets that take turns in it.
        in_turn = [zip(*self.buffers[rank][slot::slots], strict=True) for slot in range(slots)]
        largest = sum(max(sizes) for slot in in_turn for sizes in slot)
        return RankCost(
            rank,
            self.matrices[rank],
            self.flops[rank],
            self.sent[rank] * self.plan.wire_bytes,
            self.received[rank] * self.plan.wire_bytes,
            largest * self.plan.wire_bytes,
            self.collectives[rank],
        )

    def pieces(self, matrix: int, bucket: Bucket) -> Iterator[tuple[int, int]]:
        """(rank, elements) of each piece of a matrix within a bucket's group."""
        owner = self.plan.matrices[matrix]
        for rank, elements in self.geometries[owner.parameter].elements(owner.block).items():
            if rank in self.members:
                yield rank, elements

    def add(self, bucket: Bucket) -> None:
        self.members = frozenset(bucket.group)
        if bucket.exchange == "all_to_all":
            self._all_to_all(bucket)
        else:
            self._all_gather(bucket)

    def _all_to_all(self, bucket: Bucket) -> None:
        home, gathered, inbox, outbox = (dict.fromkeys(bucket.group, 0) for _ in range(4))
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = self.geometries[self.plan.matrices[matrix].parameter].replica
            self._orthogonalize(matrix, owner)
            for rank, elements in self.pieces(matrix, bucket):
                home[rank] += elements
                sent = replica[rank] == replica[owner]
                gathered[rank] += elements if sent else 0
                if rank != owner:
                    outbox[owner] += elements
                    self._move(owner, rank, elements)
                if rank != owner and sent:
                    inbox[owner] += elements
                    self._move(rank, owner, elements)
        for rank in bucket.group:
            mirrored = inbox[rank] == outbox[rank] and gathered[rank] == home[rank]
            self._close(rank, (home[rank], inbox[rank], 0 if mirrored else outbox[rank]), 2)

    def _all_gather(self, bucket: Bucket) -> None:
        stored = dict.fromkeys(bucket.group, 0)
        for matrix in bucket.matrices:
            for rank, elements in self.pieces(matrix, bucket):
                stored[rank] += elements
                if not bucket.owners:
                    self._orthogonalize(matrix, rank)
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=False):
            self._orthogonalize(matrix, owner)
        total, others = sum(stored.values()), len(bucket.group) - 1
        for rank in bucket.group:
            self.sent[rank] += stored[rank] * others
            self.received[rank] += total - stored[rank]
            if bucket.owners:
                self.sent[rank] += total - stored[rank]
                self.received[rank] += stored[rank] * others
            self._close(rank, (stored[rank], total, total if bucket.owners else 0), 2 if bucket.owners else 1)

    def _orthogonalize(self, matrix: int, rank: int) -> None:
        self.matrices[rank] += 1
        self.flops[rank] += self.plan.matrices[matrix].flops

    def _move(self, source: int, target: int, elements: int) -> None:
        self.sent[source] += elements
        self.received[target] += elements

    def _close(self, rank: int, buffers: tuple[int, int, int], collectives: int) -> None:
        self.buffers[rank].append(buffers)
        self.collectives[rank] += collectives


def _least_sent(plan: Plan, geometries: Geometries) -> int:
    """Bytes over all ranks if the rank with the largest piece of each matrix of the buckets were its owner."""
    total = 0
    for index, ranks in enumerate(plan.home):
        if ranks:
            continue
        matrix = plan.matrices[index]
        elements = geometries[matrix.parameter].elements(matrix.block)
        largest = max(elements.values())
        total += (matrix.numel - largest) + (sum(elements.values()) - largest)
    return total * plan.wire_bytes
