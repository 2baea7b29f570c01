"""Which ranks have to meet to make a matrix whole, and which matrices are whole already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layout import Geometry


@dataclass(frozen=True)
class Meeting:
    """Where one block of a parameter becomes whole.

    `home` are the ranks that hold it whole and need nobody. Otherwise each of `groups` (global ranks, ascending) makes
    it whole once: one group when replicas split the work, one for each replica when they repeat it.
    """

    home: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def meetings(geometry: Geometry, split: bool) -> tuple[Meeting, ...]:
    """A Meeting for each block. With `split`, ranks that hold copies are one group and share out the matrices.

    Blocks with a rank in common meet in the same group, so that they can travel together. If all blocks do, the group
    is the whole mesh: ranks without a row of a small parameter can orthogonalize it too.
    """
    blocks = range(len(geometry.stack.blocks))
    holders = [tuple(geometry.elements(block)) for block in blocks]
    whole = [_whole(geometry, block, split) for block in blocks]
    parts = [() if whole[block] else _by_replica(geometry, holders[block], split) for block in blocks]
    components = _Components(ranks for copies in parts for ranks in copies)
    meshes = _by_replica(geometry, geometry.layout.mesh.ranks, split)
    groups = _widened(components, meshes)
    return tuple(
        Meeting(holders[block] if whole[block] else (), tuple(groups[ranks[0]] for ranks in parts[block]))
        for block in blocks
    )


def _whole(geometry: Geometry, block: int, split: bool) -> bool:
    """Whether every holder has all of the block, and none of them could leave it to another."""
    elements = geometry.elements(block)
    return set(elements.values()) == {geometry.numel(block)} and (len(elements) == 1 or not split)


def _by_replica(geometry: Geometry, ranks: Sequence[int], split: bool) -> tuple[tuple[int, ...], ...]:
    if split:
        return (tuple(sorted(ranks)),)
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        copies.setdefault(geometry.replica[rank], []).append(rank)
    return tuple(tuple(sorted(copy)) for copy in copies.values())


def _widened(components: _Components, meshes: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Group of each rank: its component, or its whole mesh when nobody else of that mesh forms another one."""
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
        while self.parent[rank] != rank:
            self.parent[rank] = self.parent[self.parent[rank]]
            rank = self.parent[rank]
        return rank

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(self._members[self.root(rank)])
