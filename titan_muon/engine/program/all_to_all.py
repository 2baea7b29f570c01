"""The all-to-all, and the interface of every exchange pattern: a rank's program of a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from ..layout.intervals import Pieces, Ranks
from ..layout.types import Bucket, Piece
from .phases import BucketProgram, Collective, Phase, parcels, splits

GATHER, RETURN = 0, 1


class Pattern(ABC):
    """The exchange of a bucket's matrices.

    `has_owners`: whether a single owner orthogonalizes each matrix. `knows_nodes`: whether it reads the ranks per node.
    """

    name: str
    has_owners = True
    knows_nodes = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The program of a rank of the group."""

    def fallback(self, kind: int, group: Ranks, pieces: Pieces) -> str:
        """What matrices of this kind have so that they go by all_to_all; empty if nothing."""
        return ""

    def groups(self, bucket: Bucket, pieces: Pieces) -> tuple[Iterable[Ranks], Iterable[Ranks]]:
        """The ranks of each gather and return, and of each collective over replicas, ascending."""
        return (bucket.group,), ()


class AllToAll(Pattern):
    """Every piece travels to the owner of its matrix, and back: each element once in each direction."""

    name = "all_to_all"

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        gather, back = (self.phase(bucket, rank, pieces, direction) for direction in (GATHER, RETURN))
        pairs = zip(bucket.matrices, bucket.owners, strict=True)
        matrices = tuple(matrix for matrix, owner in pairs if owner == rank)
        return BucketProgram(bucket, matrices, gather, back, gather == back)

    def phase(self, bucket: Bucket, rank: int, pieces: Pieces, direction: int) -> Phase:
        to_owners: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        from_holders: dict[int, list[tuple[int, Piece]]] = {peer: [] for peer in bucket.group}
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            replica = pieces.geometry(matrix).replica
            for holder in bucket.group if owner == rank else (rank,):
                piece = pieces.find(matrix, holder)
                if piece is None or (direction == GATHER and replica[holder] != replica[owner]):
                    continue
                if holder == rank:
                    to_owners[owner].append((matrix, piece))
                else:
                    from_holders[holder].append((matrix, piece))
        return Phase(
            collective=Collective.ALL_TO_ALL,
            home=parcels(to_owners, [rank, *(peer for peer in bucket.group if peer != rank)]),
            owned=parcels(from_holders, self.arrival(bucket.group, pieces)),
            home_splits=splits({**to_owners, rank: ()}, bucket.group),
            owned_splits=splits(from_holders, bucket.group),
            travels=_travels(bucket, pieces, direction),
            group=bucket.group,
        )

    def arrival(self, group: Ranks, pieces: Pieces) -> Sequence[int]:
        """The order of holders in the owner's buffer."""
        return group


def _travels(bucket: Bucket, pieces: Pieces, direction: int) -> bool:
    """Whether any holder, in the gather of the owner's replica, sends a piece to another rank. Equal on all ranks."""
    for kind, owners in owners_by_kind(bucket, pieces).items():
        holders, replica = pieces.holders(kind, bucket.group), pieces.geometry(pieces.examples[kind]).replica
        for owner in owners:
            if any(peer != owner and (direction == RETURN or replica[peer] == replica[owner]) for peer in holders):
                return True
    return False


def owners_by_kind(bucket: Bucket, pieces: Pieces) -> dict[int, dict[int, int]]:
    """The number of matrices by kind and owner."""
    by_kind: dict[int, dict[int, int]] = {}
    kinds = (pieces.kinds[matrix] for matrix in bucket.matrices)
    for (kind, owner), count in Counter(zip(kinds, bucket.owners, strict=True)).items():
        by_kind.setdefault(kind, {})[owner] = count
    return by_kind
