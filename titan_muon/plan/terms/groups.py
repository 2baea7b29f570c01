"""The ranks that assemble a matrix from pieces, and the ranks that store all of a matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layout import Geometry


@dataclass(frozen=True)
class Assembly:
    """The ranks to orthogonalize a matrix.

    `local`: ranks that store the whole matrix; nothing is sent. `groups`: sets of ranks whose pieces together are the
    matrix. Replicas share one group (`split`), or each has its own (`redundant`).
    """

    local: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def assemblies(geometry: Geometry, split: bool) -> tuple[Assembly, ...]:
    """The Assembly of each matrix. `split`: replicas divide the matrices."""
    indices = range(len(geometry.stack.matrices))
    holders = [tuple(geometry.elements(index)) for index in indices]
    sets = [_by_replica(geometry, ranks, split) for ranks in holders]
    whole = [
        set(geometry.elements(index).values()) == {geometry.numel(index)}
        and all(len(ranks) == 1 for ranks in sets[index])
        for index in indices
    ]
    replicas = [() if whole[index] else sets[index] for index in indices]
    groups = components(ranks for of_matrix in replicas for ranks in of_matrix)
    # The whole mesh if it has a single component, or 3 rows over 4 ranks would leave a rank idle. Never join
    # components: experts of different expert-parallel ranks would travel over all ranks.
    for mesh in _by_replica(geometry, geometry.layout.mesh.ranks, split):
        if len({groups[rank] for rank in mesh if rank in groups}) == 1:
            groups |= dict.fromkeys(mesh, mesh)
    return tuple(
        Assembly(holders[index] if whole[index] else (), tuple(groups[ranks[0]] for ranks in replicas[index]))
        for index in indices
    )


def _by_replica(geometry: Geometry, ranks: Sequence[int], split: bool) -> tuple[tuple[int, ...], ...]:
    # The result returns to every replica, and every rank can own: HSDP divides the work by the number of replicas.
    return tuple(tuple(sorted(members)) for members in geometry.by_replica(ranks, joined=split))


def components(sets: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each rank, the ranks connected by common sets, ascending."""
    # Neighbouring heads or experts may share a rank, and each overlapping group would need a process group.
    component: dict[int, tuple[int, ...]] = {}
    for ranks in sets:
        first = component.get(ranks[0])
        # Thousands of matrices have the same holders.
        if first is None or any(component.get(rank) is not first for rank in ranks):
            joined = tuple(sorted({*ranks, *(peer for rank in ranks for peer in component.get(rank, ()))}))
            component |= dict.fromkeys(joined, joined)
    return component
