"""The elements of each matrix of a plan on each rank, and the ranks that assemble a matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .intervals import Geometries, Geometry
from .types import Matrix, Piece, Plan

Ranks = tuple[int, ...]
Key = Callable[[int], Hashable]
"""The key of a rank: only ranks with equal keys exchange a matrix."""
Place = tuple[Hashable, int | None]
"""A key and a node, or all nodes (None)."""


class HoldersByKey(NamedTuple):
    """The holders of a kind's matrices: places, and elements and ranks at each place."""

    places: dict[int, tuple[Place, Place]]
    elements: Counter[Place]
    ranks: Counter[Place]


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
        self._holders: dict[tuple[int, Ranks], dict[int, int]] = {}
        self._by_key: dict[tuple[int, Ranks, Hashable], HoldersByKey] = {}
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

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def holders(self, kind: int, group: Ranks) -> Mapping[int, int]:
        """Elements of a matrix of the kind, by rank of the group with any."""
        if (kind, group) not in self._holders:
            example, members = self.examples[kind], frozenset(group)
            stored = self.geometry(example).elements(self.matrices[example].index)
            self._holders[kind, group] = {rank: size for rank, size in stored.items() if rank in members}
        return self._holders[kind, group]

    def places(self, rank: int, key: Key) -> tuple[Place, Place]:
        """The place of a rank in all nodes, and in its node."""
        return (key(rank), None), (key(rank), self.node(rank))

    def by_key(self, kind: int, group: Ranks, name: Hashable, key: Key) -> HoldersByKey:
        """The holders by the key with this name."""
        # Kept, because a search deals the same matrices hundreds of times.
        if (kind, group, name) not in self._by_key:
            found = HoldersByKey({}, Counter(), Counter())
            for rank, elements in self.holders(kind, group).items():
                found.places[rank] = self.places(rank, key)
                for place in found.places[rank]:
                    found.elements[place] += elements
                    found.ranks[place] += 1
            self._by_key[kind, group, name] = found
        return self._by_key[kind, group, name]

    def replicas(self, kind: int, group: Ranks) -> tuple[Ranks, ...]:
        """The ranks of each replica of a kind's matrices; equal positions store equal pieces."""
        if (kind, group) not in self._replicas:
            geometry, members = self.geometry(self.examples[kind]), frozenset(group)
            # Mesh order is the order of pieces in every replica.
            in_mesh = (rank for rank in geometry.layout.mesh.ranks if rank in members)
            self._replicas[kind, group] = geometry.by_replica(in_mesh)
        return self._replicas[kind, group]


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


@dataclass(frozen=True)
class Assembly:
    """The ranks to orthogonalize a matrix.

    `local`: ranks that store the whole matrix; nothing is sent. `groups`: sets of ranks whose pieces together are the
    matrix. Replicas share one group (`split`), or each has its own (`redundant`).
    """

    local: Ranks
    groups: tuple[Ranks, ...]


def assemblies(geometry: Geometry, split: bool) -> tuple[Assembly, ...]:
    """The Assembly of each matrix. `split`: replicas divide the matrices."""

    def by_replica(ranks: Iterable[int]) -> tuple[Ranks, ...]:
        # The result returns to every replica, and every rank can own: HSDP divides the work by the number of replicas.
        return tuple(tuple(sorted(members)) for members in geometry.by_replica(ranks, joined=split))

    holders = [geometry.elements(index) for index in range(len(geometry.stack.matrices))]
    sets = [by_replica(stored) for stored in holders]
    whole = [
        set(stored.values()) == {geometry.numel(index)} and all(len(ranks) == 1 for ranks in sets[index])
        for index, stored in enumerate(holders)
    ]
    groups = components(ranks for index, of_matrix in enumerate(sets) if not whole[index] for ranks in of_matrix)
    # The whole mesh if it has a single component, or 3 rows over 4 ranks would leave a rank idle. Never join
    # components: experts of different expert-parallel ranks would travel over all ranks.
    for mesh in by_replica(geometry.layout.mesh.ranks):
        if len({groups[rank] for rank in mesh if rank in groups}) == 1:
            groups |= dict.fromkeys(mesh, mesh)
    return tuple(
        Assembly(tuple(stored), ()) if whole[index] else Assembly((), tuple(groups[ranks[0]] for ranks in sets[index]))
        for index, stored in enumerate(holders)
    )


def components(sets: Iterable[Sequence[int]]) -> dict[int, Ranks]:
    """For each rank, the ranks connected by common sets, ascending."""
    # Neighbouring heads or experts may share a rank, and each overlapping group would need a process group.
    component: dict[int, Ranks] = {}
    for ranks in sets:
        first = component.get(ranks[0])
        # Thousands of matrices have the same holders.
        if first is None or any(component.get(rank) is not first for rank in ranks):
            joined = tuple(sorted({*ranks, *(peer for rank in ranks for peer in component.get(rank, ()))}))
            component |= dict.fromkeys(joined, joined)
    return component
