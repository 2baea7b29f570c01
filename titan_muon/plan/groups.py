"""Which ranks assemble a matrix from its pieces, and which store all of it already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layout import Geometry


@dataclass(frozen=True)
class Assembly:
    """Where one matrix of a parameter is orthogonalized.

    Attributes:
        home: ranks that store all of it and need no other; empty if it has to be assembled.
        groups: groups of global ranks, ascending, that each assemble it once: one group when replicas split the work,
            one for each replica when they repeat it.
    """

    home: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def assemblies(geometry: Geometry, split: bool) -> tuple[Assembly, ...]:
    """The Assembly of each matrix. With `split`, ranks that hold copies are one group and share out the matrices."""
    indices = range(len(geometry.stack.matrices))
    holders = [tuple(geometry.elements(index)) for index in indices]
    whole = [_whole(geometry, index, split) for index in indices]
    parts = [() if whole[index] else _by_replica(geometry, holders[index], split) for index in indices]
    components = _Components(ranks for copies in parts for ranks in copies)
    meshes = _by_replica(geometry, geometry.layout.mesh.ranks, split)
    groups = _widened(components, meshes)
    return tuple(
        Assembly(holders[index] if whole[index] else (), tuple(groups[ranks[0]] for ranks in parts[index]))
        for index in indices
    )


def _whole(geometry: Geometry, index: int, split: bool) -> bool:
    """Whether every holder has all of the matrix, and none of them could leave it to another."""
    elements = geometry.elements(index)
    return set(elements.values()) == {geometry.numel(index)} and (len(elements) == 1 or not split)


def _by_replica(geometry: Geometry, ranks: Sequence[int], split: bool) -> tuple[tuple[int, ...], ...]:
    # With `split` all copies are one group although one copy would do to assemble the matrix: the result has to return
    # to every copy, and the ranks of all of them can own. Over HSDP that divides the work by the number of replicas.
    if split:
        return (tuple(sorted(ranks)),)
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        copies.setdefault(geometry.replica[rank], []).append(rank)
    return tuple(tuple(sorted(copy)) for copy in copies.values())


def _widened(components: _Components, meshes: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Group of each rank: its component, or its whole mesh when nobody else of that mesh forms another one."""
    # Components, not the holders of each matrix: neighbouring heads or experts may share the rank at their border, and
    # groups that overlap without being equal would each need a process group and collectives of their own.
    # The whole mesh where there is one component: 3 rows over 4 ranks leave one without a row, which would be idle in
    # every step. But never across components: experts of other expert-parallel ranks would then travel over all ranks.
    groups = {}
    for mesh in meshes:
        members = set(mesh)
        roots = {components.root(rank) for rank in components.parent if rank in members}
        for rank in components.parent:
            if rank in members:
                groups[rank] = mesh if len(roots) == 1 else components.members(rank)
    return groups


def connected(rank: int, sets: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that are with `rank` in one of the sets, or with one that is, and so on; ascending, empty if none."""
    components = _Components(sets)
    return components.members(rank) if rank in components.parent else ()


class _Components:
    """Ranks connected by the sets they appear in together (union-find)."""

    def __init__(self, sets: Iterable[Sequence[int]]) -> None:
        self.parent: dict[int, int] = {}
        for ranks in sets:
            for rank in ranks:
                self.parent.setdefault(rank, rank)
                self.parent[self.root(rank)] = self.root(ranks[0])
        self._members: dict[int, list[int]] = {}
        for rank in sorted(self.parent):
            self._members.setdefault(self.root(rank), []).append(rank)

    def root(self, rank: int) -> int:
        # Path halving: without it a chain of 1,024 ranks would be walked from end to end for each of them.
        while self.parent[rank] != rank:
            self.parent[rank] = self.parent[self.parent[rank]]
            rank = self.parent[rank]
        return rank

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(self._members[self.root(rank)])
