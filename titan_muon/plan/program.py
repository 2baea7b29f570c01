"""One rank's part of a plan: which piece goes to which place of which buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .layout import Geometries, Geometry
from .schedule import Turn, schedule
from .types import Bucket, Piece, Plan


@dataclass(frozen=True)
class Parcel:
    """A piece of a matrix in a buffer: `piece.numel` elements from `offset`, row-major, exchanged with `peer`."""

    matrix: int
    peer: int
    piece: Piece
    offset: int


@dataclass(frozen=True)
class Leg:
    """One collective of a bucket, seen from one rank.

    `home` are the parcels of pieces that this rank stores, in its home buffer; `owned` those of the matrices that it
    orthogonalizes, in its owner's buffer. The splits are the elements exchanged with each rank of the group.

    In an all-to-all the home parcels whose peer is the rank itself come first and never travel: their split is zero
    and they have no owned parcel. In an all-gather the rank's own pieces are among the owned ones.
    """

    home: tuple[Parcel, ...]
    owned: tuple[Parcel, ...]
    home_splits: tuple[int, ...]
    owned_splits: tuple[int, ...]

    @property
    def kept(self) -> int:
        """Elements of the home buffer that never travel."""
        return self.home_numel - sum(self.home_splits)

    @property
    def home_numel(self) -> int:
        """Elements of the home buffer."""
        return sum(parcel.piece.numel for parcel in self.home)

    @property
    def owned_numel(self) -> int:
        """Elements of the owner's buffer."""
        return sum(parcel.piece.numel for parcel in self.owned)


@dataclass(frozen=True)
class Run:
    """A bucket as one rank runs it: gather, orthogonalize `matrices`, return.

    Without a `returning` leg every rank has orthogonalized what it stores, and its home parcels are already there.
    `mirrored`: the return is the gather backwards, so both may use the same buffers.
    """

    bucket: Bucket
    matrices: tuple[int, ...]
    gathering: Leg
    returning: Leg | None
    mirrored: bool

    @property
    def held(self) -> tuple[Parcel, ...]:
        """A parcel for each piece that this rank stores: what it updates when the bucket is back."""
        return self.gathering.home if self.returning is None else self.returning.home


@dataclass(frozen=True)
class Home:
    """A matrix that this rank holds whole and orthogonalizes without communication."""

    matrix: int
    piece: Piece


@dataclass(frozen=True)
class Program:
    """Everything one rank does in a step.

    `rounds[k]` are the indices of its runs of round k: none, one, or with several groups more.
    """

    rank: int
    home: tuple[Home, ...]
    runs: tuple[Run, ...]
    rounds: tuple[tuple[int, ...], ...]
    slots: int
    turns: tuple[Turn, ...]

    def slot(self, index: int) -> tuple[int, int]:
        """Which buffers a run uses: those of its round's slot, and among them the ones for its place in the round."""
        number = self.runs[index].bucket.round
        return number % self.slots, self.rounds[number].index(index)


def make_program(plan: Plan, rank: int, geometries: Geometries | None = None) -> Program:
    """The part of `rank` in the plan."""
    pieces = _Pieces(plan, Geometries(plan.parameters) if geometries is None else geometries)
    home = tuple(Home(m, pieces.of(m, rank)) for m, ranks in enumerate(plan.home) if rank in ranks)
    runs = tuple(_run(bucket, rank, pieces) for bucket in plan.buckets if rank in bucket.group)
    rounds = tuple(
        tuple(i for i, run in enumerate(runs) if run.bucket.round == number) for number in range(plan.rounds)
    )
    slots = max(1, min(plan.slots, plan.rounds))
    return Program(rank, home, runs, rounds, slots, schedule(plan.rounds, slots))


class _Pieces:
    """Pieces by matrix and rank."""

    def __init__(self, plan: Plan, geometries: Geometries) -> None:
        self.plan = plan
        self.geometries = geometries

    def geometry(self, matrix: int) -> Geometry:
        return self.geometries[self.plan.matrices[matrix].parameter]

    def find(self, matrix: int, rank: int) -> Piece | None:
        return self.geometry(matrix).pieces[rank].get(self.plan.matrices[matrix].block)

    def of(self, matrix: int, rank: int) -> Piece:
        piece = self.find(matrix, rank)
        assert piece is not None, f"rank {rank} holds nothing of matrix {matrix}"
        return piece

    def same_copy(self, matrix: int, a: int, b: int) -> bool:
        replica = self.geometry(matrix).replica
        return replica[a] == replica[b]


def _run(bucket: Bucket, rank: int, pieces: _Pieces) -> Run:
    if bucket.exchange == "all_gather":
        return _gather_run(bucket, rank, pieces)
    if bucket.exchange == "all_gather_reduce_scatter":
        return _gather_reduce_run(bucket, rank, pieces)
    gathering = _owner_leg(bucket, rank, pieces, lambda matrix, owner, holder: pieces.same_copy(matrix, owner, holder))
    returning = _owner_leg(bucket, rank, pieces, lambda matrix, owner, holder: True)
    mine = tuple(m for m, owner in zip(bucket.matrices, bucket.owners, strict=True) if owner == rank)
    return Run(bucket, mine, gathering, returning, gathering == returning)


def _owner_leg(bucket: Bucket, rank: int, pieces: _Pieces, travels: Callable[[int, int, int], bool]) -> Leg:
    """Parcels between holders and owners, for those (matrix, owner, holder) that take part in this leg."""
    home: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
    owned: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        piece = pieces.find(matrix, rank)
        if piece is not None and travels(matrix, owner, rank):
            home[owner].append((matrix, piece))
        if owner == rank:
            for holder in bucket.group:
                theirs = pieces.find(matrix, holder)
                if holder != rank and theirs is not None and travels(matrix, owner, holder):
                    owned[holder].append((matrix, theirs))
    others = [peer for peer in bucket.group if peer != rank]
    return Leg(
        home=_parcels(home, [rank, *others]),
        owned=_parcels(owned, others),
        home_splits=_splits(home, bucket.group, rank),
        owned_splits=_splits(owned, bucket.group, rank),
    )


def _gather_run(bucket: Bucket, rank: int, pieces: _Pieces) -> Run:
    """Every rank sends all its pieces to all, itself included, and orthogonalizes each matrix it has a piece of."""
    stored = _stored(bucket, pieces)
    leg = _gather_leg(bucket, rank, stored)
    return Run(bucket, tuple(m for m, _ in stored[rank]), leg, None, False)


def _gather_reduce_run(bucket: Bucket, rank: int, pieces: _Pieces) -> Run:
    """As an all-gather, but the owner alone orthogonalizes; a sum with zeros from all others brings the result back."""
    leg = _gather_leg(bucket, rank, _stored(bucket, pieces))
    mine = tuple(m for m, owner in zip(bucket.matrices, bucket.owners, strict=True) if owner == rank)
    return Run(bucket, mine, leg, leg, False)


def _stored(bucket: Bucket, pieces: _Pieces) -> dict[int, list[tuple[int, Piece]]]:
    return {
        peer: [(m, piece) for m in bucket.matrices if (piece := pieces.find(m, peer)) is not None]
        for peer in bucket.group
    }


def _gather_leg(bucket: Bucket, rank: int, stored: dict[int, list[tuple[int, Piece]]]) -> Leg:
    return Leg(
        home=_parcels({rank: stored[rank]}, [rank]),
        owned=_parcels(stored, bucket.group),
        home_splits=(),
        owned_splits=tuple(sum(piece.numel for _, piece in stored[peer]) for peer in bucket.group),
    )


def _parcels(by_peer: dict[int, list[tuple[int, Piece]]], order: Sequence[int]) -> tuple[Parcel, ...]:
    parcels, offset = [], 0
    for peer in order:
        for matrix, piece in by_peer[peer]:
            parcels.append(Parcel(matrix, peer, piece, offset))
            offset += piece.numel
    return tuple(parcels)


def _splits(by_peer: dict[int, list[tuple[int, Piece]]], group: Iterable[int], rank: int) -> tuple[int, ...]:
    return tuple(0 if peer == rank else sum(piece.numel for _, piece in by_peer[peer]) for peer in group)
