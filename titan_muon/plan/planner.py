"""From parameters to a plan: who orthogonalizes what, in which buckets, over which groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .buckets import longest_path, rounds
from .choice import fastest
from .cost import Link, Work
from .groups import Meeting, meetings
from .layout import Geometries
from .ledger import Ledger
from .owners import OWNERS, Owners, Task
from .types import Bucket, Matrix, Parameter, Plan

GIB = 2**30
AUTO_BUFFER_BYTES = 4 * GIB
SMALLEST_BUCKET_BYTES = 32 * 2**20
WITHIN_BEST = 1.02
GUESS_FACTOR = 2
BUCKET_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
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


WorkOf = Callable[[int, int, int], Work]
"""How matrices of (index of the parameter, rows, columns) are orthogonalized."""


def make_plan(parameters: Sequence[Parameter], work_of: WorkOf, options: PlanOptions) -> Plan:
    """The plan of one optimizer step. Deterministic: equal arguments give an equal plan on every rank."""
    geometries = Geometries(parameters)
    matrices, works = _matrices(parameters, geometries, work_of)
    work = _divide(parameters, matrices, geometries, options)
    buckets, slots = _choose(work, matrices, geometries, options)
    return Plan(tuple(parameters), matrices, work.home, buckets, slots, options.wire_bytes, works)


def _matrices(
    parameters: Sequence[Parameter], geometries: Geometries, work_of: WorkOf
) -> tuple[tuple[Matrix, ...], tuple[Work, ...]]:
    matrices = []
    works: dict[Work, int] = {}
    for index, parameter in enumerate(parameters):
        cols = geometries[index].col_count
        for number, block in enumerate(parameter.stack.blocks):
            rows = sum(stop - start for start, stop in block.rows)
            work = work_of(index, rows, cols)
            matrices.append(Matrix(index, number, rows, cols, work.flops, works.setdefault(work, len(works))))
    return tuple(matrices), tuple(works)


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


@dataclass(frozen=True)
class _Draft:
    """Buckets that could be the plan's: the FLOPs of their longest path, and a guess at their buffers in bytes."""

    buckets: tuple[Bucket, ...]
    slots: int
    path: int
    guess: int


def _choose(
    work: _Work, matrices: Sequence[Matrix], geometries: Geometries, options: PlanOptions
) -> tuple[tuple[Bucket, ...], int]:
    """The draft to prefer among those that fit the byte budget. Raises ValueError if none does."""
    budget = AUTO_BUFFER_BYTES if options.buffer_bytes is None else options.buffer_bytes
    sizes, least = _Sizes(work, options.exchange), None
    for candidates in sizes.candidates(budget):
        for draft in _by_preference(_drafts(candidates, sizes, work, matrices, geometries, options)):
            taken = _buffer_elements(draft, matrices, geometries) * options.wire_bytes
            if taken <= budget:
                return draft.buckets, draft.slots
            least = taken if least is None else min(least, taken)
    assert least is not None, "there is always a draft"
    raise ValueError(
        f"muon.buffer_gib = {budget / GIB:.3g} is too small: these matrices take at least {least / GIB:.3g} GiB of "
        "buffers; raise it or use more ranks"
    )


def _by_preference(drafts: Sequence[_Draft]) -> Iterator[_Draft]:
    """Small buffers first among the paths within 2 % of the best; then the others, short paths first."""
    best = min(draft.path for draft in drafts)
    yield from sorted(
        drafts,
        key=lambda d: (0, d.guess, len(d.buckets), d.path) if d.path <= WITHIN_BEST * best else (1, d.path, d.guess),
    )


def _drafts(
    candidates: Sequence[tuple[int, int]],
    sizes: _Sizes,
    work: _Work,
    matrices: Sequence[Matrix],
    geometries: Geometries,
    options: PlanOptions,
) -> list[_Draft]:
    load = work.load(matrices)
    drafts = []
    for count, slots in candidates:
        grouped = rounds(work.tasks, work.groups, count)
        for owners in _owners(grouped, work, load, options):
            buckets = _buckets(grouped, work, owners, options.exchange)
            if options.exchange == "auto":
                buckets = tuple(fastest(b, matrices, geometries, options.link, options.wire_bytes) for b in buckets)
            path, _ = longest_path(buckets, matrices, load, slots)
            drafts.append(_Draft(buckets, slots, path, sizes.buffers(count, slots)))
    return drafts


def _owners(
    grouped: Sequence[Sequence[Task]], work: _Work, load: Mapping[int, int], options: PlanOptions
) -> Iterator[Owners | None]:
    """Every assignment worth trying; None where every rank does all it holds."""
    if options.exchange == "all_gather":
        yield None
        return
    seen: list[Owners] = []
    for assign in OWNERS[options.owners]:
        owners = assign(grouped, work.groups, load)
        if owners not in seen:
            seen.append(owners)
            yield owners


def _buffer_elements(draft: _Draft, matrices: Sequence[Matrix], geometries: Geometries) -> int:
    """Elements of the exchange's buffers on the rank that has most."""
    ledger = Ledger(matrices, geometries)
    for bucket in draft.buckets:
        ledger.add(bucket)
    return max(ledger.buffer(rank, draft.slots) for rank in ledger.ranks)


class _Sizes:
    """Bytes of the tasks, to guess at buffers before owners are known.

    Attributes:
        share: bytes of its largest group that a rank stores or owns.
    """

    def __init__(self, work: _Work, exchange: str) -> None:
        total, self._largest, self._tasks = [0] * len(work.groups), [0] * len(work.groups), [0] * len(work.groups)
        for task in work.tasks:
            total[task.group] += task.bytes
            self._largest[task.group] = max(self._largest[task.group], task.bytes)
            self._tasks[task.group] += 1
        everywhere = exchange in ("all_gather", "all_gather_reduce_scatter")
        self._shares = [t if everywhere else t / len(group) for t, group in zip(total, work.groups, strict=True)]
        groups_of: dict[int, list[int]] = {}
        for index, group in enumerate(work.groups):
            for rank in group:
                groups_of.setdefault(rank, []).append(index)
        self._memberships = {tuple(indices) for indices in groups_of.values()}
        self.share = max(self._shares, default=0)

    def candidates(self, budget: int) -> Iterator[list[tuple[int, int]]]:
        """Numbers of buckets and slots to try together, until one fits the budget in bytes.

        First a few buckets of some size; then more and more for the sake of small buffers, up to a bucket for each
        matrix; at last buckets that do not overlap. What is far over the budget by a guess is not tried.
        """
        few = [c for c in range(1, FEW_BUCKETS + 1) if c == 1 or self.share >= c * SMALLEST_BUCKET_BYTES]
        tasks = max(self._tasks, default=1)
        many = [*(c for c in BUCKET_COUNTS if c < tasks), tasks]
        last = [(tasks, 1)]
        tiers = [
            list(dict.fromkeys((count, min(slots, count)) for count in few for slots in SLOT_COUNTS)),
            *([(count, min(slots, count)) for slots in SLOT_COUNTS] for count in many),
            *([(count, 1)] for count in many),
        ]
        for tier in tiers:
            if near := [pair for pair in tier if pair in last or self.buffers(*pair) <= GUESS_FACTOR * budget]:
                yield near

    def buffers(self, count: int, slots: int) -> int:
        """A guess at the buffers of the busiest rank, in bytes: its pieces, and the matrices it owns."""
        return max((self._buffers(indices, count, slots) for indices in self._memberships), default=0)

    def _buffers(self, groups: Sequence[int], count: int, slots: int) -> int:
        bucket = self.share / count
        return int(
            slots
            * sum(min(self._shares[g], bucket) + max(min(self._shares[g], bucket), self._largest[g]) for g in groups)
        )


def _buckets(
    grouped: Sequence[Sequence[Task]], work: _Work, owners: Owners | None, exchange: str
) -> tuple[Bucket, ...]:
    buckets = []
    for number, tasks in enumerate(grouped):
        for group in sorted({task.group for task in tasks}):
            chosen = tuple(task.matrix for task in tasks if task.group == group)
            ranks = () if owners is None else tuple(owners[matrix, group] for matrix in chosen)
            buckets.append(Bucket(exchange, work.groups[group], chosen, ranks, number))
    return tuple(buckets)
