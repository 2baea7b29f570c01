"""Which ranks assemble a matrix from its pieces, and which store all of it already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layout import Geometry


@dataclass(frozen=True)
class Assembly:
    """Where one matrix of a parameter is orthogonalized.

    `local` are the ranks that store all of it and need no other. Otherwise each of `groups` (global ranks, ascending)
    assembles it once: one group when replicas split the work, one for each replica when they repeat it.
    """

    local: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def assemblies(geometry: Geometry, split: bool) -> tuple[Assembly, ...]:
    """The Assembly of each matrix. With `split`, ranks that hold copies are one group and share out the matrices."""
    indices = range(len(geometry.stack.matrices))
    holders = [tuple(geometry.elements(index)) for index in indices]
    whole = [_whole(geometry, index, split) for index in indices]
    parts = [() if whole[index] else _by_replica(geometry, holders[index], split) for index in indices]
    groups = components(ranks for replicas in parts for ranks in replicas)
    # The whole mesh where there is one component: 3 rows over 4 ranks leave one without a row, which would be idle in
    # every step. But never across components: experts of other expert-parallel ranks would then travel over all ranks.
    for mesh in _by_replica(geometry, geometry.layout.mesh.ranks, split):
        if len({groups[rank] for rank in mesh if rank in groups}) == 1:
            groups |= dict.fromkeys(mesh, mesh)
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
    replicas: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        replicas.setdefault(geometry.replica[rank], []).append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in replicas.values())


def components(sets: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each rank all that it is connected to by sets they appear in together, ascending."""
    # Components, not the sets themselves: neighbouring heads or experts may share the rank at their border, and groups
    # that overlap without being equal would each need a process group and collectives of their own.
    found: dict[int, tuple[int, ...]] = {}
    for ranks in sets:
        first = found.get(ranks[0])
        # Thousands of matrices have the same holders: only a set that joins something new is worth sorting.
        if first is None or any(found.get(rank) is not first for rank in ranks):
            joined = tuple(sorted({*ranks, *(peer for rank in ranks for peer in found.get(rank, ()))}))
            found |= dict.fromkeys(joined, joined)
    return found
