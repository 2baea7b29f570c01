"""A bucket from the view of a rank: the place of each piece in each buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ..terms.types import Bucket, Piece

ALIGNMENT = 64
"""Alignment in elements, because collectives need aligned memory."""


def aligned(elements: int) -> int:
    """Elements with padding."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


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
class Phase:
    """A collective of a bucket, from the view of a rank.

    `home`: parcels of the local pieces, in the home buffer. `owned`: parcels of the matrices to orthogonalize, in the
    owner's buffer. Splits: elements exchanged with each rank of the `group` (global ranks). `travels`: whether any two
    ranks exchange elements.
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
