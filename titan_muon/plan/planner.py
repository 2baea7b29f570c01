"""From parameters to a plan: who orthogonalizes what, in which buckets, over which groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .buckets import longest_path, rounds
from .choice import fastest
from .cost import Link
from .groups import Meeting, meetings
from .layout import Geometries
from .owners import OWNERS, Owners, Task
from .types import Bucket, Matrix, Parameter, Plan

GIB = 2**30
AUTO_BUFFER_BYTES = 4 * GIB
SMALLEST_BUCKET_BYTES = 32 * 2**20
WITHIN_BEST = 1.02
BUCKET_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FEW_BUCKETS = 4
SLOT_COUNTS = (2, 3, 4, 8)
EXCHANGES = ("all_gather", "all_to_all", "all_gather_reduce_scatter", "auto")


@dataclass(frozen=True)
class PlanOptions:
    """What a user may choose about the plan.

    Attributes:
        exchange: a name in EXCHANGES. `auto` takes the fastest for each bucket, by `link`.
        owners: a name in OWNERS; or `everyone`, which is what an all-gather comes to whatever is named here.
        replicas: whether ranks that hold copies of a matrix `split` the work, repeat it (`redundant`), or do what is
            faster by `link` (`auto`).
        buffer_bytes: most bytes of exchange buffers on a rank; None for the smallest that cost no balance.
        wire_bytes: bytes of an element in transit.
        link: what communication costs.
    """

    exchange: str = "all_to_all"
    owners: str = "balanced"
    replicas: str = "split"
    buffer_bytes: int | None = None
    wire_bytes: int = 2
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        choices = {
            "exchange": EXCHANGES,
            "owners": (*OWNERS, "everyone"),
            "replicas": ("split", "redundant", "auto"),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"muon.{name} = {value!r} is not known; choose one of {', '.join(known)}")
        if self.owners == "everyone" and self.exchange != "all_gather":
            raise ValueError("muon.owners = 'everyone' needs every piece everywhere: set muon.exchange = 'all_gather'")


FlopCount = Callable[[int, int, int], int]
"""Newton-Schulz FLOPs of (index of the parameter, rows, columns)."""


def make_plan(parameters: Sequence[Parameter], flops: FlopCount, options: PlanOptions) -> Plan:
    """The plan of one optimizer step. Deterministic: equal arguments give an equal plan on every rank."""
    geometries = Geometries(parameters)
    matrices = _matrices(parameters, geometries, flops)
    work = _divide(parameters, matrices, geometries, options)
    if options.exchange == "all_gather":
        buckets, slots = _gathered(work, options)
    else:
        buckets, slots = _owned(work, matrices, options)
    if options.exchange == "auto":
        buckets = tuple(fastest(bucket, matrices, geometries, options.link, options.wire_bytes) for bucket in buckets)
    return Plan(tuple(parameters), matrices, work.home, buckets, slots, options.wire_bytes)


def _matrices(parameters: Sequence[Parameter], geometries: Geometries, flops: FlopCount) -> tuple[Matrix, ...]:
    matrices = []
    for index, parameter in enumerate(parameters):
        cols = geometries[index].col_count
        for number, block in enumerate(parameter.stack.blocks):
            rows = sum(stop - start for start, stop in block.rows)
            matrices.append(Matrix(index, number, rows, cols, flops(index, rows, cols)))
    return tuple(matrices)


@dataclass(frozen=True)
class _Work:
    """Matrices that stay at home, and tasks for the others, with the groups of ranks that share them."""

    home: tuple[tuple[int, ...], ...]
    tasks: tuple[Task, ...]
    groups: tuple[tuple[int, ...], ...]

    def load(self, matrices: Sequence[Matrix]) -> dict[int, int]:
        """FLOPs at home by rank."""
        load = {rank: 0 for group in self.groups for rank in group}
        for matrix, ranks in zip(matrices, self.home, strict=True):
            for rank in ranks:
                load[rank] = load.get(rank, 0) + matrix.flops
        return load


def _divide(
    parameters: Sequence[Parameter], matrices: Sequence[Matrix], geometries: Geometries, options: PlanOptions
) -> _Work:
    met: dict[tuple[int, bool], tuple[Meeting, ...]] = {}
    groups: dict[tuple[int, ...], int] = {}
    home: list[tuple[int, ...]] = []
    tasks: list[Task] = []
    for index, matrix in enumerate(matrices):
        split = not parameters[matrix.parameter].plain and _splits(matrix, options)
        key = (geometries.index[matrix.parameter], split)
        if key not in met:
            met[key] = meetings(geometries[matrix.parameter], split)
        meeting = met[key][matrix.block]
        home.append(meeting.home)
        for ranks in meeting.groups:
            group = groups.setdefault(ranks, len(groups))
            layer = parameters[matrix.parameter].layer
            tasks.append(Task(index, group, matrix.flops, matrix.numel * options.wire_bytes, layer))
    return _Work(tuple(home), tuple(tasks), tuple(groups))


def _splits(matrix: Matrix, options: PlanOptions) -> bool:
    """Whether replicas share out this matrix. It saves FLOPs and costs sending the result to each of them."""
    if options.exchange == "all_gather":
        return False
    if options.replicas == "auto":
        sent = matrix.numel * options.wire_bytes
        return options.link.compute_seconds(matrix.flops) > sent / options.link.bandwidth
    return options.replicas == "split"


def _gathered(work: _Work, options: PlanOptions) -> tuple[tuple[Bucket, ...], int]:
    """Buckets without owners, as many as the byte budget asks for."""
    budget = AUTO_BUFFER_BYTES if options.buffer_bytes is None else options.buffer_bytes
    total = [0] * len(work.groups)
    for task in work.tasks:
        total[task.group] += task.bytes
    count = max(1, -(-2 * max(total, default=0) // budget))
    return _buckets(rounds(work.tasks, work.groups, count), work, None, "all_gather"), 2


def _owned(work: _Work, matrices: Sequence[Matrix], options: PlanOptions) -> tuple[tuple[Bucket, ...], int]:
    """The smallest buffers whose longest path is within 2 % of the best that the byte budget allows."""
    budget = AUTO_BUFFER_BYTES if options.buffer_bytes is None else options.buffer_bytes
    load = work.load(matrices)
    sizes = _Sizes(work)
    tried = []
    for count, slots in _candidates(work, budget):
        grouped = rounds(work.tasks, work.groups, count)
        for assign in OWNERS[options.owners]:
            buckets = _buckets(grouped, work, assign(grouped, work.groups, load), options.exchange)
            path, _ = longest_path(buckets, matrices, load, slots)
            tried.append((path, sizes.buffers(count, slots), slots, buckets))
            if count == 1:
                break
    best = min(path for path, *_ in tried)
    _, _, slots, buckets = min((t for t in tried if t[0] <= WITHIN_BEST * best), key=lambda t: (t[1], len(t[3]), t[0]))
    return buckets, slots


def _candidates(work: _Work, budget: int) -> list[tuple[int, int]]:
    """Numbers of buckets and slots worth trying: few buckets of some size, more only where the budget asks for them.

    Raises ValueError when even one matrix at a time does not fit the budget.
    """
    sizes = _Sizes(work)
    tried = dict.fromkeys((c, min(slots, c * sizes.overlap)) for c in BUCKET_COUNTS for slots in SLOT_COUNTS)
    fitting = [candidate for candidate in tried if sizes.buffers(*candidate) <= budget]
    if not fitting:
        least = min(sizes.buffers(*candidate) for candidate in tried)
        raise ValueError(
            f"muon.buffer_gib = {budget / GIB:.3g} is too small: these matrices need at least {least / GIB:.3g} GiB"
        )
    few = [c for c in fitting if c[0] == 1 or (c[0] <= FEW_BUCKETS and sizes.share >= c[0] * SMALLEST_BUCKET_BYTES)]
    return few if few else [candidate for candidate in fitting if candidate[0] == fitting[0][0]]


class _Sizes:
    """Bytes of the tasks, to estimate buffers before owners are known.

    Attributes:
        share: a rank's share of the bytes of its largest group.
        overlap: groups that a rank is part of, at most.
    """

    def __init__(self, work: _Work) -> None:
        self._total, self._largest = [0] * len(work.groups), [0] * len(work.groups)
        for task in work.tasks:
            self._total[task.group] += task.bytes
            self._largest[task.group] = max(self._largest[task.group], task.bytes)
        self._shares = [total // len(group) for total, group in zip(self._total, work.groups, strict=True)]
        groups_of: dict[int, list[int]] = {}
        for index, group in enumerate(work.groups):
            for rank in group:
                groups_of.setdefault(rank, []).append(index)
        self._memberships = {tuple(indices) for indices in groups_of.values()}
        self.share = max(self._shares, default=0)
        self.overlap = max((len(indices) for indices in self._memberships), default=1)

    def buffers(self, count: int, slots: int) -> int:
        """Estimate of the buffers of the busiest rank, in bytes: its pieces, and the matrices it owns."""
        return max((self._buffers(indices, count, slots) for indices in self._memberships), default=0)

    def _buffers(self, groups: Sequence[int], count: int, slots: int) -> int:
        bucket = self.share // count
        buckets = [min(self._shares[g], bucket) + max(min(self._shares[g], bucket), self._largest[g]) for g in groups]
        counts = [max(1, round(count * self._shares[g] / self.share)) for g in groups]
        everything = sum(n * size for n, size in zip(counts, buckets, strict=True))
        return everything if slots >= sum(counts) else slots * max(buckets)


def _buckets(
    grouped: Sequence[Sequence[Task]], work: _Work, owners: Owners | None, exchange: str
) -> tuple[Bucket, ...]:
    buckets = []
    for tasks in grouped:
        for group in sorted({task.group for task in tasks}):
            chosen = tuple(task.matrix for task in tasks if task.group == group)
            ranks = () if owners is None else tuple(owners[matrix, group] for matrix in chosen)
            buckets.append(Bucket(exchange, work.groups[group], chosen, ranks))
    return tuple(buckets)
