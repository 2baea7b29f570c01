"""Rounds in the order of the model's backward or forward, to hide their communication."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ...options import Overlap
from ..terms.pieces import Pieces, Ranks
from .owners import OwnerOf, Task


class ModelOrder:
    """Sorts tasks into the order of a pass: backward reaches the last parameters first, forward the first.

    `eligible`: the possible owners of a matrix, if fewer than the group.
    """

    # Backward launches a round at the last of its gradients; forward waits for a round at the first of its parameters.

    def __init__(self, overlap: Overlap, pieces: Pieces, eligible: Mapping[int, Ranks]) -> None:
        self._sign = -1 if overlap == "backward" else 1
        self._pieces, self._eligible = pieces, eligible

    def rounds(self, tasks: Sequence[Task], count: int) -> list[list[Task]]:
        """Tasks in at most `count` rounds of consecutive matrices."""
        total, seen = sum(task.bytes for task in tasks), 0
        result: list[list[Task]] = [[] for _ in range(count)]
        for task in sorted(tasks, key=lambda task: (self._sign * task.matrix, task.group)):
            result[count * (2 * seen + task.bytes) // (2 * total)].append(task)
            seen += task.bytes
        return [round_tasks for round_tasks in result if round_tasks]

    def exchanged(self, rounds: Sequence[Sequence[Task]], owners: OwnerOf) -> tuple[list[list[Task]], OwnerOf]:
        """The same rounds, with tasks of equal cost exchanged between rounds and owners to be nearly in order."""
        # Layers are equal, so rounds balanced over ranks can also be in the model's order, kind by kind.
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for number, tasks in enumerate(rounds):
            for place, task in enumerate(tasks):
                places.setdefault(self._kind(task), []).append((number, place))
        exchanged, owned = [list(tasks) for tasks in rounds], dict(owners)
        for positions in places.values():
            before = [rounds[number][place] for number, place in positions]
            after = sorted(before, key=lambda task: self._sign * task.matrix)
            for (number, place), old, new in zip(positions, before, after, strict=True):
                exchanged[number][place] = new
                owned[new.matrix, new.group] = owners[old.matrix, old.group]
        return exchanged, owned

    def _kind(self, task: Task) -> Hashable:
        matrix = task.matrix
        # Slices keep their owners, which orthogonalize a matrix together.
        sliced = matrix if self._pieces.matrices[matrix].slice is not None else None
        return task.group, self._pieces.kinds[matrix], task.flops, self._eligible.get(matrix), sliced
