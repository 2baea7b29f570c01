"""The order of gathers, orthogonalizations and applies, round by round, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from ...options import Overlap
from .types import Bucket

EARLY = 1 / 8
"""Communication of the first eighth of the model is not overlapped: its gradients come last in backward, and forward
needs its weights first."""


class Act(Enum):
    """Stages of a bucket."""

    GATHER = "gather"
    ORTHOGONALIZE = "orthogonalize"
    APPLY = "apply"


ACTS = (Act.GATHER, Act.ORTHOGONALIZE, Act.APPLY)


Turn = tuple[Act, int]
"""An act on the rank's buckets of a round; ORTHOGONALIZE includes the return."""


def prefetch(buffer_sets: int, rounds: int) -> int:
    """Rounds gathered ahead of the current round."""
    # Half of the sets gather ahead and half return, because a gather waits for the last return from the same buffers.
    # With a set for every round, all are gathered at once.
    return rounds - 1 if buffer_sets >= rounds else buffer_sets // 2


def late_rounds(buffer_sets: int, rounds: int) -> range:
    """The rounds applied after all rounds are orthogonalized, because no round waits for the buffers."""
    return range(max(0, rounds - buffer_sets), rounds)


class OverlappedRounds(NamedTuple):
    """First rounds gathered in the backward before the step, and last rounds returned in the next forward."""

    gathers: int = 0
    returns: int = 0


NO_OVERLAP = OverlappedRounds()


def overlapped_rounds(overlap: Overlap, buffer_sets: int, rounds: int, ordered: int) -> OverlappedRounds:
    """The rounds that `overlap` hides, at most the result `ordered` of `ordered_rounds`."""
    if overlap == "backward":
        # Minus one: nothing hides the last gather of the opening, with the last gradients of backward.
        return OverlappedRounds(gathers=max(0, min(ordered, prefetch(buffer_sets, rounds))))
    if overlap == "forward":
        return OverlappedRounds(returns=min(ordered, len(late_rounds(buffer_sets, rounds))))
    return NO_OVERLAP


def ordered_rounds(buckets: Iterable[Bucket], overlap: Overlap) -> int:
    """How many rounds can be overlapped, because they have no matrix of the EARLY share.

    Backward counts from the first round, forward from the last.
    """
    least: dict[int, int] = {}
    most = 0
    for bucket in () if overlap == "none" else buckets:
        least[bucket.round] = min(least.get(bucket.round, bucket.matrices[0]), *bucket.matrices)
        most = max(most, *bucket.matrices)
    first = min(least.values(), default=0)
    early = first + EARLY * (most + 1 - first)
    in_order = sorted(least, reverse=overlap == "forward")
    return sum(1 for _ in takewhile(lambda number: least[number] >= early, in_order))


def schedule(rounds: int, buffer_sets: int) -> tuple[list[Turn], list[Turn]]:
    """The turns before and after the local buckets."""
    # All ranks have the same turns, with or without buckets in a round. Otherwise groups with common ranks could launch
    # collectives in different orders, and hang.
    ahead = prefetch(buffer_sets, rounds)
    opening = [(Act.GATHER, k) for k in range(min(ahead + 1, rounds))]
    turns = []
    for k in range(rounds):
        coming = k + ahead
        if k > 0 and coming < rounds:
            # Before the gather overwrites the buffers.
            if coming >= buffer_sets:
                turns.append((Act.APPLY, coming - buffer_sets))
            turns.append((Act.GATHER, coming))
        turns.append((Act.ORTHOGONALIZE, k))
    turns += [(Act.APPLY, k) for k in late_rounds(buffer_sets, rounds)]
    return opening, turns
