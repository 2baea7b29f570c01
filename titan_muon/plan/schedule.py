"""The order in which a rank gathers, orthogonalizes and applies its buckets."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Act(Enum):
    """What a rank does in a turn."""

    GATHER = "gather"
    HOME = "home"
    ORTHOGONALIZE = "orthogonalize"
    APPLY = "apply"


class Turn(NamedTuple):
    """One act, for the rank's run number `run`; HOME is for all matrices at home at once."""

    act: Act
    run: int


def prefetch(slots: int, count: int) -> int:
    """How many buckets are gathered ahead of the one being orthogonalized, of a rank that runs `count` in all.

    With a slot for every bucket all are gathered at once and nothing waits. Otherwise half of the slots gather ahead
    and half return behind.
    """
    return count - 1 if slots >= count else slots // 2


def schedule(count: int, slots: int) -> tuple[Turn, ...]:
    """The turns of a rank with `count` buckets that take turns in `slots` sets of buffers.

    The first buckets are in flight while the matrices at home are orthogonalized. A bucket is gathered into a slot only
    when the bucket before it there is applied. To orthogonalize is to send back what was gathered.
    """
    ahead = prefetch(slots, count)
    turns = [Turn(Act.GATHER, run) for run in range(min(ahead + 1, count))]
    turns.append(Turn(Act.HOME, 0))
    for run in range(count):
        coming = run + ahead
        if run > 0 and coming < count:
            if coming >= slots:
                turns.append(Turn(Act.APPLY, coming - slots))
            turns.append(Turn(Act.GATHER, coming))
        turns.append(Turn(Act.ORTHOGONALIZE, run))
    turns += [Turn(Act.APPLY, run) for run in range(max(0, count - slots), count)]
    return tuple(turns)
