"""The order in which ranks gather, orthogonalize and apply their buckets: the same on all of them, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from ...options import Overlap
from .types import Bucket

EARLY = 1 / 8
"""Part of what travels, the model's first matrices, that hides nothing: backward ends and forward begins with them."""


class Act(Enum):
    """What a rank does in a turn."""

    GATHER = "gather"
    ORTHOGONALIZE = "orthogonalize"
    APPLY = "apply"


ACTS = (Act.GATHER, Act.ORTHOGONALIZE, Act.APPLY)
"""The acts of one bucket, in order."""


class Turn(NamedTuple):
    """One act, on all the rank's buckets of round `round`."""

    act: Act
    round: int


class Schedule(NamedTuple):
    """The turns of a step. Local buckets come between `opening` and `turns`: they need no communication, and fill the
    time in which the first rounds are in flight. ORTHOGONALIZE includes the return."""

    opening: tuple[Turn, ...]
    turns: tuple[Turn, ...]


def prefetch(buffer_sets: int, rounds: int) -> int:
    """How many rounds are gathered ahead of the one being orthogonalized."""
    # With a slot for every round all are gathered at once and nothing waits. Otherwise half of the slots gather ahead
    # and half return behind: were all of them ahead, each gather would first wait for the return of the round just
    # computed.
    return rounds - 1 if buffer_sets >= rounds else buffer_sets // 2


def late_rounds(buffer_sets: int, rounds: int) -> range:
    """The rounds that are applied when all are orthogonalized: those whose buffers no other round is waiting for."""
    return range(max(0, rounds - buffer_sets), rounds)


class Hidden(NamedTuple):
    """How many rounds the model hides: gathers of the first ones in the backward before the step, returns and applies
    of the last ones in the forward behind it."""

    gathers: int = 0
    returns: int = 0


NOTHING = Hidden()


def hidden_rounds(overlap: Overlap, buffer_sets: int, rounds: int, ordered: int) -> Hidden:
    """What is hidden of rounds of which the model comes to `ordered` in the order that `overlap` wants."""
    if overlap == "backward":
        # Of those that the step would begin with the last has the gradients that come last: nothing is left to hide it.
        return Hidden(gathers=max(0, min(ordered, prefetch(buffer_sets, rounds))))
    if overlap == "forward":
        return Hidden(returns=min(ordered, len(late_rounds(buffer_sets, rounds))))
    return NOTHING


def ordered_rounds(buckets: Iterable[Bucket], overlap: Overlap) -> int:
    """How many rounds have no matrix of the EARLY part: of the first ones for backward, of the last for forward."""
    least: dict[int, int] = {}
    most = 0
    for bucket in () if overlap == "none" else buckets:
        least[bucket.round] = min(least.get(bucket.round, bucket.matrices[0]), *bucket.matrices)
        most = max(most, *bucket.matrices)
    first = min(least.values(), default=0)
    early = first + EARLY * (most + 1 - first)
    in_order = sorted(least, reverse=overlap == "forward")
    return sum(1 for _ in takewhile(lambda number: least[number] >= early, in_order))


def schedule(rounds: int, buffer_sets: int) -> Schedule:
    """The schedule of a step of so many rounds in `slots` sets of buffers."""
    # A rank has the same turns as all others, whether it has buckets in a round or not, so that every group sees its
    # collectives in one order. If ranks skipped the turns in which they have nothing to do, two groups that share ranks
    # could launch theirs in different orders, and NCCL would hang.
    ahead = prefetch(buffer_sets, rounds)
    opening = tuple(Turn(Act.GATHER, k) for k in range(min(ahead + 1, rounds)))
    turns = []
    for k in range(rounds):
        coming = k + ahead
        if k > 0 and coming < rounds:
            # The round that was in this slot must be applied before its buffers are overwritten.
            if coming >= buffer_sets:
                turns.append(Turn(Act.APPLY, coming - buffer_sets))
            turns.append(Turn(Act.GATHER, coming))
        turns.append(Turn(Act.ORTHOGONALIZE, k))
    turns += [Turn(Act.APPLY, k) for k in late_rounds(buffer_sets, rounds)]
    return Schedule(opening, tuple(turns))
