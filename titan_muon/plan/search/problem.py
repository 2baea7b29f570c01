"""The problem that the search solves: which matrices need an owner, and which ranks can be it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ...options import MuonOptions
from ..cost.times import Costs
from ..exchange.all_gather import PATTERNS
from ..exchange.pattern import Pattern
from ..terms.groups import assemblies
from ..terms.layout import Geometries
from ..terms.types import Matrix, Parameter
from .owners import OwnerOf, Ranks, Task
from .state import able_owners


@dataclass(frozen=True)
class Problem:
    """Matrices that need an owner, and the costs that a plan for them is judged by.

    Attributes:
        parameters: of the plan; matrices in slices are slices in their stacks too.
        options: the user's.
        pattern: exchange of all buckets.
        costs: seconds of everything on the machine.
        local: for each matrix the ranks that store all of it and orthogonalize it there.
        tasks: for each other matrix one task for each group that assembles it.
        groups: global ranks of the groups.
        load: FLOPs that a rank has locally.
        able: the ranks that can own a matrix, where not all of its group can.
        owners: owners that are decided already, for slices and tensor-parallel groups.
    """

    parameters: tuple[Parameter, ...]
    options: MuonOptions
    pattern: Pattern
    costs: Costs
    local: tuple[Ranks, ...]
    tasks: tuple[Task, ...]
    groups: tuple[Ranks, ...]
    load: Mapping[int, int]
    able: Mapping[int, Ranks]
    owners: OwnerOf | None = None

    @property
    def sliced(self) -> bool:
        """Whether any matrix is in slices."""
        return any(matrix.slice is not None for matrix in self.costs.pieces.matrices)


def make_problem(
    parameters: Sequence[Parameter], geometries: Geometries, options: MuonOptions, costs: Costs
) -> Problem:
    """The problem of whole matrices, in which replicas share the work or repeat it, as the options say."""
    groups: dict[Ranks, int] = {}

    @cache
    def placed(geometry: int, split: bool) -> list[tuple[Ranks, list[int]]]:
        """For each matrix of a parameter its ranks locally, and the numbers of the groups that assemble it."""
        found = assemblies(geometries.shared[geometry], split)
        return [(one.local, [groups.setdefault(ranks, len(groups)) for ranks in one.groups]) for one in found]

    pattern, matrices = PATTERNS[options.exchange], costs.pieces.matrices
    local: list[Ranks] = []
    tasks: list[Task] = []
    load: dict[int, int] = {}
    for number, matrix in enumerate(matrices):
        parameter = parameters[matrix.parameter]
        # Replicate promises that replicas are equal. A plain tensor promises nothing about the other ranks' tensors:
        # where they were not found equal, one rank's result would silently replace another's.
        split = pattern.has_owners and not parameter.own and options.replicas != "redundant"
        ranks, assembled_by = placed(geometries.index[matrix.parameter], split)[matrix.index]
        local.append(ranks)
        for rank in ranks:
            load[rank] = load.get(rank, 0) + matrix.flops
        for group in assembled_by:
            tasks.append(Task(number, group, matrix.flops, matrix.numel * options.wire_bytes, parameter.layer))
    able = _able(parameters, matrices, tasks, tuple(groups))
    return Problem(tuple(parameters), options, pattern, costs, tuple(local), tuple(tasks), tuple(groups), load, able)


def _able(
    parameters: Sequence[Parameter], matrices: Sequence[Matrix], tasks: Sequence[Task], groups: Sequence[Ranks]
) -> dict[int, Ranks]:
    """The ranks that can own a matrix, where that depends on who keeps its momentum."""

    @cache
    def inside(ranks: Ranks, group: int) -> Ranks:
        return tuple(sorted({*ranks} & {*groups[group]}))

    found = {}
    for task in tasks:
        matrix = matrices[task.matrix]
        if ranks := able_owners(parameters[matrix.parameter], matrix.index):
            found[task.matrix] = inside(ranks, task.group)
    return found
