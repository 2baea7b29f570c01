"""Which matrices are worth cutting into slices for several ranks, and who has which slice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...options import MuonOptions, OptionError
from ..cost.times import Costs
from ..exchange.all_gather import PATTERNS
from ..terms.layout import Geometries
from ..terms.pieces import Pieces
from ..terms.slices import Ranks, divides, sliced, slices_of, teams
from ..terms.types import Matrix, Parameter
from ..terms.work import Work, WorkOf
from .owners import Balancer, OwnerOf, Task, by_group, spread
from .problem import Problem

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
"""Over the mean of all ranks: how late a rank may end before a matrix is cut instead of given to it whole."""
GAIN = 0.99
"""What is cut has to end the busiest rank this much earlier at least."""
MUST_SAVE = 0.03
"""Part of the modelled price of whole matrices that slices have to save under `auto`."""
COUNTS = (2, 4, 8)
"""Numbers of slices."""
ALWAYS = -math.inf
"""As a limit: what has an offer is shared, whether that ends sooner or not."""


@dataclass(frozen=True)
class Offer:
    """A way to give a matrix to several ranks: into how many slices it is cut, what one of them is by, its seconds in
    picoseconds, and the sets of ranks that can have them."""

    count: int
    work: Work
    taken: int
    teams: tuple[Ranks, ...]


Offers = dict[tuple[int, int], tuple[Offer, ...]]
"""How each (matrix, group) can be shared."""


@dataclass(frozen=True)
class Shared:
    """A matrix cut as an offer says for these ranks, and when the last of them is done with it."""

    end: int
    offer: Offer
    ranks: Ranks


@dataclass(frozen=True)
class Balance:
    """Which ranks have which task of `Problem.tasks`, one each or a slice each, when the busiest of them ends, and the
    latest end that a task with an offer has, or would have had whole."""

    owners: tuple[Ranks, ...]
    longest: int
    latest: int


def check_split_over(options: MuonOptions) -> None:
    """Raise OptionError where no matrix can have several owners, although the options ask for it."""
    fault = slices_fault(options)
    if fault and options.split_over not in (1, "auto"):
        raise OptionError("split_over", f"= {options.split_over}: {fault}, or split_over = 1")


def slices_fault(options: MuonOptions) -> str:
    """Why no matrix can have several owners, and what would let it; empty if it can."""
    if options.orthogonalize == "reference":
        return "orthogonalize = 'reference' is of whole matrices; choose 'auto'"
    if not PATTERNS[options.exchange].has_owners:
        return f"exchange = {options.exchange!r} has no owners; choose 'all_to_all'"
    return one_owner_fault(options)


def one_owner_fault(options: MuonOptions) -> str:
    """What needs a single owner of each matrix, and what does not; empty if nothing does."""
    if options.state == "owner":
        return "state = 'owner' keeps a matrix's momentum for one rank; choose 'replicated'"
    return ""


def with_cuts(problem: Problem, work_of: WorkOf) -> Problem | None:
    """The problem with the matrices cut that would end a step late, or None if no cut ends it sooner."""
    if problem.options.split_over == 1 or slices_fault(problem.options):
        return None
    offers = _offers(problem, work_of)
    if not offers:
        return None
    tasks = timed(problem)
    load = loads(problem)
    mean = (sum(task.flops for task in tasks) + sum(load.values())) / len(problem.costs.pieces.ranks())
    # What large groups leave uneven, small ones even out, but some of their ranks then have more bytes than others.
    # Where links take longer than Newton-Schulz it is faster to share the matrices of the large groups.
    for small_first in (False, True) if len(problem.groups) > 1 else (False,):
        whole = balance(problem, tasks, load, offers, math.inf, small_first=small_first)
        limits = [limit * mean for limit in (LIMITS[:1] if small_first else LIMITS) if limit * mean < whole.latest]
        found = [balance(problem, tasks, load, offers, limit, small_first=small_first) for limit in limits]
        best = min(found, key=lambda one: one.longest, default=whole)
        if best.longest < GAIN * whole.longest:
            return cut(problem, offers, best)
    return None


def slices_reason(problem: Problem) -> str:
    """How many matrices are in slices, or why none is; empty unless the options allow slices."""
    options = problem.options
    if options.split_over == 1 and options.tensor_parallel != "distributed":
        return ""
    cut = sum(matrix.slice is not None and matrix.slice.place == 0 for matrix in problem.costs.pieces.matrices)
    if cut:
        return f"matrices in slices: {cut:,}"
    sooner = f"would save {MUST_SAVE:.0%} of the step" if options.split_over == "auto" else "would end the step sooner"
    return f"no matrix in slices: {slices_fault(options) or f'none {sooner}'}"


def timed(problem: Problem) -> list[Task]:
    """The tasks with their Newton-Schulz in picoseconds for FLOPs, so that what owners send each other counts too."""
    costs = problem.costs
    taken = [picoseconds(costs, matrix, costs.works[matrix.work]) for matrix in costs.pieces.matrices]
    return [task._replace(flops=taken[task.matrix]) for task in problem.tasks]


def picoseconds(costs: Costs, matrix: Matrix, work: Work) -> int:
    """What a matrix, or a slice of one, takes by a work; in integers, so that all ranks find the same."""
    return int(1e12 * costs.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), 1))


def loads(problem: Problem) -> dict[int, int]:
    """Picoseconds of what each rank has locally."""
    return {rank: int(1e12 * local.owned.seconds) for rank, local in problem.costs.local(problem.local).items()}


def _offers(problem: Problem, work_of: WorkOf) -> Offers:
    """How each matrix can be cut: what one group alone assembles, where that has enough ranks on a node."""
    # Replicas that repeat the work are several groups, which would each need their own slices of the same matrix.
    groups = Counter(task.matrix for task in problem.tasks)
    most = problem.options.split_over
    counts = [count for count in COUNTS if most == "auto" or count <= most]
    there = [
        [count for count in counts if teams(group, count, problem.costs.machine.ranks_per_node)]
        for group in problem.groups
    ]
    found, known = Offers(), dict[tuple[int, int], Sequence[Offer]]()
    for task in problem.tasks:
        if there[task.group] and groups[task.matrix] == 1:
            kind = problem.costs.pieces.kinds[task.matrix], task.group
            if kind not in known:
                known[kind] = _offered(problem, task.matrix, task.group, there[task.group], work_of)
            found[task.matrix, task.group] = tuple(known[kind])
    return {place: offers for place, offers in found.items() if offers}


def _offered(problem: Problem, number: int, group: int, counts: Sequence[int], work_of: WorkOf) -> list[Offer]:
    costs, matrix = problem.costs, problem.costs.pieces.matrices[number]
    stored, shape = problem.parameters[matrix.parameter].stack.matrices[matrix.index], (matrix.rows, matrix.cols)
    found, whole = [], picoseconds(costs, matrix, costs.works[matrix.work])
    for count in counts:
        if divides(stored, shape, count):
            work = work_of(matrix.parameter, *shape, count)
            taken = picoseconds(costs, slices_of(matrix, 0, 0, 0, count)[0], work)
            sets = teams(problem.groups[group], count, costs.machine.ranks_per_node)
            found += [Offer(count, work, taken, tuple(sets))] if taken < whole else []
    return found


def balance(
    problem: Problem,
    tasks: Sequence[Task],
    load: Mapping[int, int],
    offers: Offers,
    limit: float,
    *,
    small_first: bool = False,
) -> Balance:
    """Longest first to the least loaded, as `balanced`; what would end after `limit` is shared if that ends sooner."""
    balancer = Balancer(tasks, problem.costs.pieces.ranks(), load)
    owners: dict[tuple[int, int], Ranks] = {}
    latest = 0
    grouped = by_group(tasks, problem.groups)
    for index in reversed(grouped) if small_first else grouped:
        group, mine = problem.groups[index], grouped[index]
        heap = balancer.heap(group)
        for task in spread(mine):
            offered, end = offers.get((task.matrix, index), ()), heap[0][0] + task.flops
            latest = max(latest, end) if offered else latest
            shared = _shared(balancer, offered, limit) if end > limit else None
            if shared is None or (shared.end >= end and limit > ALWAYS):
                owners[task.matrix, index] = (balancer.give(task, heap),)
                continue
            for rank in shared.ranks:
                balancer.put(task._replace(flops=shared.offer.taken, bytes=task.bytes // shared.offer.count), rank)
            # The heap has what they had before.
            heap = balancer.heap(group)
            owners[task.matrix, index] = shared.ranks
    return Balance(tuple(owners[task.matrix, task.group] for task in tasks), balancer.longest(), latest)


def _shared(balancer: Balancer, offers: Sequence[Offer], limit: float) -> Shared | None:
    """The way to share a matrix that ends by `limit` with the fewest slices, or the one that ends first."""
    found = [Shared(balancer.ends(ranks) + offer.taken, offer, ranks) for offer in offers for ranks in offer.teams]
    return min(found, key=lambda one: (max(one.end, limit), one.offer.count, one.end), default=None)


def cut(problem: Problem, offers: Offers, shared: Balance) -> Problem:
    """The problem with slices for the matrices, tasks and owners of what is cut."""
    chosen = {
        task.matrix: next(offer for offer in offers[task.matrix, task.group] if offer.count == len(ranks))
        for task, ranks in zip(problem.tasks, shared.owners, strict=True)
        if len(ranks) > 1
    }
    costs = problem.costs
    matrices, works, first = _renumbered(costs, chosen)
    parameters = _parameters(problem, chosen)
    tasks, owners = list[Task](), OwnerOf()
    for task, ranks in zip(problem.tasks, shared.owners, strict=True):
        for number, rank in enumerate(ranks, start=first[task.matrix]):
            matrix = matrices[number]
            tasks.append(Task(number, task.group, matrix.flops, matrix.numel * costs.wire_bytes, task.layer))
            owners[number, task.group] = rank
    local = [ranks for number, ranks in enumerate(problem.local) for _ in range(_count(chosen.get(number)))]
    pieces = Pieces(matrices, Geometries(parameters), costs.pieces.ranks_per_node)
    return replace(
        problem,
        parameters=parameters,
        costs=Costs(pieces, works, costs.wire_bytes, costs.machine, costs.passes),
        local=tuple(local),
        tasks=tuple(tasks),
        owners=owners,
    )


def _count(offer: Offer | None) -> int:
    return 1 if offer is None else offer.count


def _renumbered(costs: Costs, chosen: Mapping[int, Offer]) -> tuple[tuple[Matrix, ...], tuple[Work, ...], list[int]]:
    """The matrices with slices for those that are cut, their works, and the first new number of each."""
    found: list[Matrix] = []
    works: dict[Work, int] = {}
    first, index = [], 0
    for number, matrix in enumerate(costs.pieces.matrices):
        index = 0 if matrix.index == 0 else index
        first.append(len(found))
        offer = chosen.get(number)
        work = costs.works[matrix.work] if offer is None else offer.work
        place = works.setdefault(work, len(works))
        if offer is not None:
            found += slices_of(matrix, index, place, work.flops, offer.count)
        else:
            found.append(replace(matrix, index=index, work=place))
        index += _count(offer)
    return tuple(found), tuple(works), first


def _parameters(problem: Problem, chosen: Mapping[int, Offer]) -> tuple[Parameter, ...]:
    counts: dict[int, dict[int, int]] = {}
    for number, offer in chosen.items():
        matrix = problem.costs.pieces.matrices[number]
        counts.setdefault(matrix.parameter, {})[matrix.index] = offer.count
    return tuple(
        sliced(parameter, counts[number]) if number in counts else parameter
        for number, parameter in enumerate(problem.parameters)
    )
