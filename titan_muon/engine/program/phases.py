"""A rank's part of a bucket: the place of each piece in each buffer. And the order of stages, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import zip_longest

from ..layout.types import Bucket, Piece

ALIGNED_ELEMENTS = 64
"""Alignment in elements, because collectives need aligned memory."""


def aligned(elements: int) -> int:
    """Elements with padding."""
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def buffer_bytes(buckets: Iterable[tuple[int, int, Sequence[int]]], buffer_sets: int) -> int:
    """Bytes of a rank's exchange buffers. `buckets`: round, bytes of an element, and elements of each buffer."""
    # Buckets of a round need separate buffers, shared with buckets at equal positions of rounds with the same set.
    largest: dict[tuple[int, int], list[int]] = {}
    last, place = -1, 0
    for number, element_bytes, buffers in buckets:
        place = place + 1 if number == last else 0
        last = number
        sizes = [element_bytes * aligned(elements) for elements in buffers]
        key = (number % buffer_sets, place)
        largest[key] = [max(pair) for pair in zip_longest(largest.get(key, []), sizes, fillvalue=0)]
    return sum(map(sum, largest.values()))


class Collective(Enum):
    """Collective of a phase."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True)
class Parcel:
    """`piece.numel` elements in a buffer from `offset`, exchanged with `peer`, [Note: pieces]."""

    matrix: int
    peer: int
    piece: Piece
    offset: int


@dataclass(frozen=True)
class Hop:
    """The way of a rank's elements by other ranks: over its `rail`, then inside its `node`, both global ranks.

    `passed`: elements that the rank passes on, from each rank of the rail to each rank of the node.
    """

    rail: tuple[int, ...]
    node: tuple[int, ...]
    passed: tuple[tuple[int, ...], ...]

    @cached_property
    def arriving_splits(self) -> tuple[int, ...]:
        return tuple(map(sum, self.passed))

    @cached_property
    def departing_splits(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.passed, strict=True)))


@dataclass(frozen=True)
class Phase:
    """A collective of a bucket, from the view of a rank.

    `home`: parcels of the local pieces, in the home buffer. `owned`: parcels of the matrices to orthogonalize, in the
    owner's buffer. Splits: elements exchanged with each rank of the `group` (global ranks); with a `hop`, home splits
    with its rail and owned splits with its node. `travels`: whether any two ranks exchange elements.
    """

    # In an all-to-all the home parcels for the rank itself come first and never travel: the split is zero, without an
    # owned parcel. In an all-gather the rank's own pieces are among the owned parcels too.

    collective: Collective
    home: tuple[Parcel, ...]
    owned: tuple[Parcel, ...]
    home_splits: tuple[int, ...]
    owned_splits: tuple[int, ...]
    travels: bool = True
    group: tuple[int, ...] = ()
    hop: Hop | None = None

    @cached_property
    def kept(self) -> int:
        """Elements of the home buffer without travel."""
        return self.home_numel - sum(self.home_splits)

    @cached_property
    def home_numel(self) -> int:
        return sum(parcel.piece.numel for parcel in self.home)

    @cached_property
    def owned_numel(self) -> int:
        return sum(parcel.piece.numel for parcel in self.owned)


@dataclass(frozen=True)
class BucketProgram:
    """A bucket from the view of a rank: gather, orthogonalize `matrices`, return.

    `returning` is None if every holder orthogonalizes, because results are already at home. `mirrored`: the return is
    the reverse of the gather, so both use the same buffers. `replica_gather`: all-gather among replicas after the
    return; home parcels are the return's, owned parcels are all local pieces.
    """

    bucket: Bucket
    matrices: tuple[int, ...]
    gathering: Phase
    returning: Phase | None
    mirrored: bool
    replica_gather: Phase | None = None

    @cached_property
    def stored(self) -> tuple[Parcel, ...]:
        if self.replica_gather is not None:
            return self.replica_gather.owned
        return self.gathering.home if self.returning is None else self.returning.home

    @property
    def local(self) -> bool:
        return len(self.bucket.group) == 1

    @property
    def buffers(self) -> tuple[int, ...]:
        """Elements of the buffers of a set: home, inbox, outbox, of replicas, and what a hop receives and sends on."""
        returned, spread, hop = self.returning, self.replica_gather, self.gathering.hop
        passed = 0 if hop is None else sum(hop.arriving_splits)
        return (
            max(phase.home_numel for phase in (self.gathering, returned) if phase is not None),
            self.gathering.owned_numel,
            # A mirrored return overwrites the received pieces: no second buffer.
            0 if returned is None or self.mirrored else returned.owned_numel,
            0 if spread is None else spread.owned_numel,
            passed,
            passed,
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(phase for phase in (self.gathering, self.returning, self.replica_gather) if phase is not None)


ByPeer = Mapping[int, Sequence[tuple[int, Piece]]]
"""(matrix, piece) pairs exchanged with each rank, in the bucket's order of matrices."""


def parcels(by_peer: ByPeer, order: Iterable[int]) -> tuple[Parcel, ...]:
    """Pieces exchanged with each rank, packed without gaps in the order of ranks."""
    # Both ends compute the same order.
    packed, offset = [], 0
    for peer in order:
        for matrix, piece in by_peer[peer]:
            packed.append(Parcel(matrix, peer, piece, offset))
            offset += piece.numel
    return tuple(packed)


def splits(by_peer: ByPeer, group: Iterable[int]) -> tuple[int, ...]:
    """Elements exchanged with each rank of the group."""
    return tuple(sum(piece.numel for _, piece in by_peer[peer]) for peer in group)


def gather_phase(stored: ByPeer, rank: int, group: tuple[int, ...], collective: Collective) -> Phase:
    """The all-gather of all `stored` pieces, or the reverse reduce-scatter, from the view of `rank`."""
    home, owned, sizes = parcels(stored, [rank]), parcels(stored, group), splits(stored, group)
    return Phase(collective, home, owned, (), sizes, travels=any(sizes), group=group)


class Act(Enum):
    """Stages of a bucket."""

    GATHER = "gather"
    ORTHOGONALIZE = "orthogonalize"
    APPLY = "apply"


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
