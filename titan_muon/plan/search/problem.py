"""The input of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ...options import MuonOptions
from ..cost.costs import Costs
from ..exchange.all_gather import PATTERNS
from ..exchange.pattern import Pattern
from ..terms.groups import assemblies
from ..terms.layout import Geometries
from ..terms.pieces import Ranks
from ..terms.types import Matrix, Parameter
from .owners import OwnerOf, Task
from .state import momentum_ranks


@dataclass(frozen=True)
class Problem:
    """Matrices to assign to owners, and costs to judge a plan.

    Attributes:
        local: for each matrix, the ranks that store and orthogonalize all of the matrix.
        tasks: for each remaining matrix, one for each assembling group.
        load: local FLOPs of each rank.
        eligible: possible owners of a matrix, if fewer than the group.
        owners: fixed, for slices and tensor-parallel groups.
    """

    parameters: tuple[Parameter, ...]
    options: MuonOptions
    pattern: Pattern
    costs: Costs
    local: tuple[Ranks, ...]
    tasks: tuple[Task, ...]
    groups: tuple[Ranks, ...]
    load: Mapping[int, int]
    eligible: Mapping[int, Ranks]
    owners: OwnerOf | None = None

    @property
    def sliced(self) -> bool:
        return any(matrix.slice is not None for matrix in self.costs.pieces.matrices)


def make_problem(
    parameters: Sequence[Parameter], geometries: Geometries, options: MuonOptions, costs: Costs
) -> Problem:
    """The problem of whole matrices."""
    groups: dict[Ranks, int] = {}

    @cache
    def placed(geometry: int, split: bool) -> list[tuple[Ranks, list[int]]]:
        """By matrix: local ranks, and numbers of the assembling groups."""
        assembled = assemblies(geometries.shared[geometry], split)
        return [(a.local, [groups.setdefault(ranks, len(groups)) for ranks in a.groups]) for a in assembled]

    pattern, matrices = PATTERNS[options.exchange], costs.pieces.matrices
    local: list[Ranks] = []
    tasks: list[Task] = []
    load: dict[int, int] = {}
    for number, matrix in enumerate(matrices):
        parameter = parameters[matrix.parameter]
        split = pattern.has_owners and options.replicas != "redundant"
        ranks, assembled_by = placed(geometries.index[matrix.parameter], split)[matrix.index]
        local.append(ranks)
        for rank in ranks:
            load[rank] = load.get(rank, 0) + matrix.flops
        for group in assembled_by:
            tasks.append(Task(number, group, matrix.flops, matrix.numel * options.wire_bytes, parameter.layer))
    eligible = _eligible(parameters, matrices, tasks, tuple(groups))
    return Problem(
        tuple(parameters), options, pattern, costs, tuple(local), tuple(tasks), tuple(groups), load, eligible
    )


def _eligible(
    parameters: Sequence[Parameter], matrices: Sequence[Matrix], tasks: Sequence[Task], groups: Sequence[Ranks]
) -> dict[int, Ranks]:
    @cache
    def inside(ranks: Ranks, group: int) -> Ranks:
        return tuple(sorted({*ranks} & {*groups[group]}))

    eligible = {}
    for task in tasks:
        matrix = matrices[task.matrix]
        if ranks := momentum_ranks(parameters[matrix.parameter], matrix.index):
            eligible[task.matrix] = inside(ranks, task.group)
    return eligible
