"""Rounds in the order of the model's backward or forward, to hide communication."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ...options import Overlap
from ..terms.pieces import Pieces, Ranks
from .owners import OwnerOf, Task


def in_model_order(
    rounds: Sequence[Sequence[Task]],
    owners: OwnerOf,
    overlap: Overlap,
    pieces: Pieces,
    eligible: Mapping[int, Ranks],
) -> tuple[list[list[Task]], OwnerOf]:
    """The same rounds, nearly in order: tasks of equal cost change rounds and owners.

    Backward reaches the last parameters first, forward the first. `eligible`: the possible owners of a matrix, if fewer
    than the group.
    """

    def kind(task: Task) -> Hashable:
        # Slices keep their owners, because a team of ranks orthogonalizes the matrix together.
        sliced = task.matrix if pieces.matrices[task.matrix].slice is not None else None
        return task.group, pieces.kinds[task.matrix], task.flops, eligible.get(task.matrix), sliced

    # Backward launches a round at the last of its gradients; forward waits for a round at the first of its parameters.
    sign = -1 if overlap == "backward" else 1
    # Layers are equal, so rounds balanced over ranks can also be in the model's order, kind by kind.
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for number, tasks in enumerate(rounds):
        for place, task in enumerate(tasks):
            places.setdefault(kind(task), []).append((number, place))
    exchanged, owned = [list(tasks) for tasks in rounds], dict(owners)
    for positions in places.values():
        before = [rounds[number][place] for number, place in positions]
        after = sorted(before, key=lambda task: sign * task.matrix)
        for (number, place), old, new in zip(positions, before, after, strict=True):
            exchanged[number][place] = new
            owned[new.matrix, new.group] = owners[old.matrix, old.group]
    return exchanged, owned
