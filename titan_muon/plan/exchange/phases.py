"""A bucket as one rank runs it: which piece goes to which place of which buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ..terms.types import Bucket, Piece

ALIGNMENT = 64
"""Elements that a buffer's place in a block is a multiple of, so that collectives read aligned memory."""


def aligned(elements: int) -> int:
    """The elements of a buffer with its padding in a block."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


class Collective(Enum):
    """What moves the parcels of a leg."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True)
class Parcel:
    """A piece of a matrix in a buffer: `piece.numel` elements from `offset`, exchanged with `peer`, [Note: pieces]."""

    matrix: int
    peer: int
    piece: Piece
    offset: int


@dataclass(frozen=True)
class Phase:
    """One collective of a bucket, seen from one rank.

    `home` are the parcels of pieces that this rank stores, in its home buffer; `owned` those of the matrices that it
    orthogonalizes, in its owner's buffer. The splits are the elements exchanged with each rank of the `group`, global
    ranks. `travels`: whether anything goes from one rank of the group to another.
    """

    # In an all-to-all the home parcels whose peer is the rank itself come first and never travel: their split is zero
    # and they have no owned parcel. What does travel is then one slice of the buffer, and needs no copy before it is
    # sent. In an all-gather, whose parts are whole buffers, the rank's own pieces are among the owned ones too.

    collective: Collective
    home: tuple[Parcel, ...]
    owned: tuple[Parcel, ...]
    home_splits: tuple[int, ...]
    owned_splits: tuple[int, ...]
    travels: bool = True
    group: tuple[int, ...] = ()

    @cached_property
    def kept(self) -> int:
        """Elements of the home buffer that never travel."""
        return self.home_numel - sum(self.home_splits)

    @cached_property
    def home_numel(self) -> int:
        """Elements of the home buffer."""
        return sum(parcel.piece.numel for parcel in self.home)

    @cached_property
    def owned_numel(self) -> int:
        """Elements of the owner's buffer."""
        return sum(parcel.piece.numel for parcel in self.owned)


@dataclass(frozen=True)
class BucketProgram:
    """A bucket as one rank runs it: gather, orthogonalize `matrices`, return.

    Without a `returning` leg every rank has orthogonalized what it stores, and its home parcels are already there.
    `mirrored`: the return is the gather backwards, so both may use the same buffers. In `spreading`, behind the return,
    ranks that store equal pieces of several copies share what each has got: its home parcels are the return's, and its
    owned ones are all that is stored here, in a buffer of their own.
    """

    bucket: Bucket
    matrices: tuple[int, ...]
    gathering: Phase
    returning: Phase | None
    mirrored: bool
    spreading: Phase | None = None

    @cached_property
    def stored(self) -> tuple[Parcel, ...]:
        """A parcel for each piece that this rank stores: what it updates when the bucket is back."""
        if self.spreading is not None:
            return self.spreading.owned
        return self.gathering.home if self.returning is None else self.returning.home

    @property
    def local(self) -> bool:
        """Whether every piece of the bucket is on this rank, so that nothing travels."""
        return len(self.bucket.group) == 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Its collectives, in order."""
        return tuple(phase for phase in (self.gathering, self.returning, self.spreading) if phase is not None)


ByPeer = Mapping[int, Sequence[tuple[int, Piece]]]
"""(matrix, piece) of what is exchanged with each rank, in the bucket's order of matrices."""


def parcels(by_peer: ByPeer, order: Iterable[int]) -> tuple[Parcel, ...]:
    """What is exchanged with each rank, packed without gaps in the order of ranks."""
    # Sender and receiver make their parcels apart. Both take the matrices in the bucket's order and the ranks in the
    # group's, so the bytes need no header; in any other order a rank would read a piece as one of another matrix.
    packed, offset = [], 0
    for peer in order:
        for matrix, piece in by_peer[peer]:
            packed.append(Parcel(matrix, peer, piece, offset))
            offset += piece.numel
    return tuple(packed)


def splits(by_peer: ByPeer, group: Iterable[int]) -> tuple[int, ...]:
    """Elements that are exchanged with each rank of the group."""
    return tuple(sum(piece.numel for _, piece in by_peer[peer]) for peer in group)
