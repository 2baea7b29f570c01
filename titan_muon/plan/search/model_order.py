"""The order in which the model comes to its matrices, for rounds that its backward or its forward is to hide."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ...options import Overlap
from ..terms.pieces import Pieces, Ranks
from .owners import OwnerOf, Task


class ModelOrder:
    """Brings tasks into the order of a pass of the model: backward comes to the last parameters first, forward to the
    first ones.

    Args:
        overlap: the pass.
        pieces: matrices and how they are stored.
        able: the ranks that can own a matrix, where not all of its group can.
    """

    # A round can travel when the last of its gradients is there, and later ones wait for it; and forward waits for a
    # round's results when it comes to the first of its parameters.

    def __init__(self, overlap: Overlap, pieces: Pieces, able: Mapping[int, Ranks]) -> None:
        self._sign = -1 if overlap == "backward" else 1
        self._pieces, self._able = pieces, able

    def rounds(self, tasks: Sequence[Task], count: int) -> list[list[Task]]:
        """Tasks in at most `count` rounds of matrices that follow each other, whoever owns them."""
        total, seen = sum(task.bytes for task in tasks), 0
        result: list[list[Task]] = [[] for _ in range(count)]
        for task in sorted(tasks, key=lambda task: (self._sign * task.matrix, task.group)):
            result[count * (2 * seen + task.bytes) // (2 * total)].append(task)
            seen += task.bytes
        return [chosen for chosen in result if chosen]

    def exchanged(self, rounds: Sequence[Sequence[Task]], owners: OwnerOf) -> tuple[list[list[Task]], OwnerOf]:
        """The same rounds, in which tasks have taken each other's places and owners, so that they are nearly in order.

        Only those that cost their owner the same in either place.
        """
        # Layers are alike, so that rounds which are even over the ranks can be in the model's order too. Of each kind:
        # a round has the first matrices of one kind beside those of another that are not as early.
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for number, tasks in enumerate(rounds):
            for place, task in enumerate(tasks):
                places.setdefault(self._kind(task), []).append((number, place))
        found, owned = [list(tasks) for tasks in rounds], dict(owners)
        for taken in places.values():
            before = [rounds[number][place] for number, place in taken]
            after = sorted(before, key=lambda task: self._sign * task.matrix)
            for (number, place), old, new in zip(taken, before, after, strict=True):
                found[number][place] = new
                owned[new.matrix, new.group] = owners[old.matrix, old.group]
        return found, owned

    def _kind(self, task: Task) -> Hashable:
        matrix = task.matrix
        # The slices of a matrix are orthogonalized together, on ranks that were chosen for each other.
        sliced = matrix if self._pieces.matrices[matrix].slice is not None else None
        return task.group, self._pieces.kinds[matrix], task.flops, self._able.get(matrix), sliced
