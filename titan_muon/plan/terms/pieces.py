"""The elements of each matrix of a plan on each rank and node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from .layout import Geometries, Geometry
from .types import Matrix, Piece, Plan

Ranks = tuple[int, ...]


class Holder(NamedTuple):
    """`elements`: of each matrix of a kind."""

    rank: int
    elements: int
    node: int


class ElementsByKey(NamedTuple):
    """Elements and ranks of the holders with one key of a route: of all, and by (key, node)."""

    elements: Counter[Hashable]
    elements_near: Counter[tuple[Hashable, int]]
    ranks: Counter[Hashable]
    ranks_near: Counter[tuple[Hashable, int]]


class Holders:
    """The holders of a kind's matrices in a group."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self.holders = holders
        self.on_rank = {holder.rank: holder.elements for holder in holders}
        self._sums: dict[tuple[str, int], ElementsByKey] = {}

    def sums(self, pattern: str, direction: int, key: Callable[[int], Hashable]) -> ElementsByKey:
        """Sums by the `key` of a rank, which depends only on pattern and direction."""
        # Kept, because a search deals the same matrices hundreds of times.
        if (pattern, direction) not in self._sums:
            sums = ElementsByKey(Counter(), Counter(), Counter(), Counter())
            for rank, elements, node in self.holders:
                place = key(rank)
                sums.elements[place] += elements
                sums.elements_near[place, node] += elements
                sums.ranks[place] += 1
                sums.ranks_near[place, node] += 1
            self._sums[pattern, direction] = sums
        return self._sums[pattern, direction]


class Pieces:
    """The piece of each matrix of a plan on each rank.

    `kinds`: by matrix. Matrices of a kind have the same work, and pieces of the same sizes on the same ranks.
    `examples`: a matrix of each kind.
    """

    # A model has tens of thousands of experts and a few kinds.

    def __init__(self, matrices: Sequence[Matrix], geometries: Geometries, ranks_per_node: int = 8) -> None:
        self.matrices = matrices
        self.ranks_per_node = ranks_per_node
        self._geometries = geometries
        self.kinds, self.examples = _kinds(matrices, geometries)
        self._holders: dict[tuple[int, Ranks], Holders] = {}
        self._replicas: dict[tuple[int, Ranks], tuple[Ranks, ...]] = {}

    @classmethod
    def from_plan(cls, plan: Plan, ranks_per_node: int = 8) -> Pieces:
        return cls(plan.matrices, Geometries(plan.parameters), ranks_per_node)

    def ranks(self) -> list[int]:
        return sorted({rank for geometry in self._geometries.shared for rank in geometry.layout.mesh.ranks})

    def geometry(self, matrix: int) -> Geometry:
        return self._geometries[self.matrices[matrix].parameter]

    def find(self, matrix: int, rank: int) -> Piece | None:
        return self.geometry(matrix).pieces[rank].get(self.matrices[matrix].index)

    def elements(self, matrix: int, ranks: Collection[int]) -> Iterator[tuple[int, int]]:
        stored = self.geometry(matrix).elements(self.matrices[matrix].index)
        return ((rank, elements) for rank, elements in stored.items() if rank in ranks)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def holders(self, kind: int, group: tuple[int, ...]) -> Holders:
        key = (kind, group)
        if key not in self._holders:
            example, members = self.examples[kind], frozenset(group)
            stored = self.elements(example, members)
            self._holders[key] = Holders([Holder(rank, size, self.node(rank)) for rank, size in stored])
        return self._holders[key]

    def replicas(self, kind: int, group: Ranks) -> tuple[Ranks, ...]:
        """The ranks of each replica of a kind's matrices; equal positions store equal pieces."""
        key = (kind, group)
        if key not in self._replicas:
            geometry, members = self.geometry(self.examples[kind]), frozenset(group)
            # Mesh order is the order of pieces in every replica.
            self._replicas[key] = geometry.by_replica(r for r in geometry.layout.mesh.ranks if r in members)
        return self._replicas[key]


def _kinds(matrices: Sequence[Matrix], geometries: Geometries) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # By geometry first, because comparing the elements of every expert takes long.
    stored: dict[tuple[int, int], int] = {}
    classes: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    numbers: dict[tuple[int, int, int], int] = {}
    kinds: list[int] = []
    examples: list[int] = []
    for number, matrix in enumerate(matrices):
        place = (geometries.index[matrix.parameter], matrix.index)
        if place not in stored:
            elements = tuple(geometries.shared[place[0]].elements(matrix.index).items())
            stored[place] = classes.setdefault((place[0], elements), len(classes))
        key = (stored[place], matrix.rows, matrix.work)
        if key not in numbers:
            numbers[key] = len(examples)
            examples.append(number)
        kinds.append(numbers[key])
    return tuple(kinds), tuple(examples)
