"""The buffers of a step: where the pieces of each bucket are packed, and the memory that only a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.exchange.phases import BucketProgram, Collective, Leg, Parcel
from ..plan.program import Program
from ..plan.terms.layout import Span, spans


class StepMemory:
    """The storages of some tensors. Views of them are made once, and hold something within a step.

    Args:
        tensors: tensors that are each a whole storage, or share one.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes: dict[torch.UntypedStorage, int] = {}
        for tensor in tensors:
            storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
            self._sizes[storage] = max(size, self._sizes.get(storage, 0))
        self.free()

    def take(self) -> None:
        """Allocate, in the stream that is current, unless it is there already; what is in it is undefined."""
        # Resized to the size that it has, a storage would move, and collectives in flight would write to where it was.
        for storage, size in self._sizes.items():
            if storage.nbytes() != size:
                storage.resize_(size)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the memory is there, so that views can be made: PyTorch makes none of a part of nothing."""
        # What a backward is sending from stays as it is: views are also made in a step, of a storage that was replaced.
        missing = [storage for storage, size in self._sizes.items() if storage.nbytes() != size]
        self.take()
        yield
        for storage in missing:
            storage.resize_(0)

    def free(self) -> None:
        """Give the memory back. What other streams did with it was waited for in the stream that is current."""
        for storage in self._sizes:
            storage.resize_(0)


@dataclass(frozen=True)
class BufferPiece:
    """A piece of a matrix (see [Note: pieces] in plan/types.py): its 2D view in a buffer, and its rectangles."""

    matrix: int
    view: Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Slot:
    """Flat buffers of one bucket in flight: pieces stored here, pieces received, pieces to send back, and pieces that
    replicas share, all of those stored here."""

    home: Tensor
    inbox: Tensor
    outbox: Tensor
    shared: Tensor

    def leaving(self, run: BucketProgram) -> Tensor:
        """The buffer that orthogonalized pieces leave from: where they came in, if they go back the same way."""
        return self.inbox if run.mirrored else self.outbox


@dataclass(frozen=True)
class BucketBuffers:
    """Where the pieces of one bucket are in the buffers of its slot, on this rank.

    Attributes:
        stored: each piece that this rank stores, in the home buffer once the bucket is back.
        packed: matrix -> view to fill with the piece that is gathered from here.
        repeated: (target, source) views: the places of a piece that goes to several ranks, and its packed one.
        sources: matrix -> the pieces that make it whole, once gathered.
        targets: matrix -> the views to fill with its orthogonalized pieces.
        cleared: buffer to set to zero before its targets are filled, or None.
    """

    stored: tuple[BufferPiece, ...]
    packed: Mapping[int, Tensor]
    repeated: tuple[tuple[Tensor, Tensor], ...]
    sources: Mapping[int, tuple[BufferPiece, ...]]
    targets: Mapping[int, tuple[BufferPiece, ...]]
    cleared: Tensor | None


def bucket_buffers(run: BucketProgram, rank: int, slot: Slot) -> BucketBuffers:
    """The views of one bucket in a slot's buffers."""
    gathering, returning = run.gathering, run.returning
    stored = _pieces(run.stored, slot.home if run.spreading is None else slot.shared)
    targets: Mapping[int, tuple[BufferPiece, ...]]
    if returning is None:
        targets = {piece.matrix: (piece,) for piece in stored}
    else:
        targets = _by_matrix(run, returning, slot.leaving(run), slot.home, rank)
    packed: dict[int, Tensor] = {}
    places = [(piece.view, packed.setdefault(piece.matrix, piece.view)) for piece in _pieces(gathering.home, slot.home)]
    # A reduce-scatter brings results back as a sum: what this rank does not own must add nothing to the others'.
    summed = returning is not None and returning.collective is Collective.REDUCE_SCATTER
    return BucketBuffers(
        stored,
        packed,
        tuple((target, source) for target, source in places if target is not source),
        _by_matrix(run, gathering, slot.inbox, slot.home, rank),
        targets,
        slot.outbox if summed else None,
    )


def _by_matrix(
    run: BucketProgram, leg: Leg, buffer: Tensor, home: Tensor, rank: int
) -> dict[int, tuple[BufferPiece, ...]]:
    """The pieces of each matrix at its owner; in an all-to-all the owner's own pieces never leave its home buffer."""
    kept = [parcel for parcel in leg.home if leg.collective is Collective.ALL_TO_ALL and parcel.peer == rank]
    found: dict[int, list[BufferPiece]] = {matrix: [] for matrix in run.matrices}
    for piece in (*_pieces(leg.owned, buffer), *_pieces(kept, home)):
        # An all-gather also brings the pieces of matrices that others orthogonalize.
        if piece.matrix in found:
            found[piece.matrix].append(piece)
    return {matrix: tuple(pieces) for matrix, pieces in found.items()}


def _pieces(parcels: Iterable[Parcel], buffer: Tensor) -> tuple[BufferPiece, ...]:
    return tuple(
        BufferPiece(p.matrix, buffer[p.offset : p.offset + p.piece.numel].view(p.piece.shape), spans(p.piece))
        for p in parcels
    )


class Buffers:
    """The flat buffers of a program on this rank, with views of every piece in them. Only a step takes their memory.

    Args:
        program: this rank's part of the plan.
        device: device that holds the buffers.
        dtype: dtype of the elements in transit.

    Attributes:
        slots: by bucket, its set of buffers; empty for a local bucket, whose shards are packed into the workspace.
        buckets: by bucket, where its pieces are; None for a local bucket.
        memory: memory of all buffers.
    """

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.slots = device, make_slots(program, device, dtype)
        self.buckets = tuple(
            None if run.local else bucket_buffers(run, program.rank, slot)
            for run, slot in zip(program.buckets, self.slots, strict=True)
        )
        self.memory = StepMemory(self.tensors)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All buffers, some of them several times."""
        for slot in self.slots:
            yield from (slot.home, slot.inbox, slot.outbox, slot.shared)


def make_slots(program: Program, device: torch.device, dtype: torch.dtype) -> tuple[Slot, ...]:
    """The buffers of each bucket; buckets of different rounds share them. A local bucket has none."""
    places = [None if run.local else program.slot(index) for index, run in enumerate(program.buckets)]
    sharing: dict[tuple[int, int], list[BucketProgram]] = {}
    for place, run in zip(places, program.buckets, strict=True):
        if place is not None:
            sharing.setdefault(place, []).append(run)
    made = {place: _slot(runs, device, dtype) for place, runs in sharing.items()}
    nothing = Slot(*(torch.empty(0, device=device, dtype=dtype) for _ in range(4)))
    return tuple(nothing if place is None else made[place] for place in places)


def _slot(runs: Sequence[BucketProgram], device: torch.device, dtype: torch.dtype) -> Slot:
    """Buffers large enough for each of these buckets, which take turns in them."""
    home = max(max(run.gathering.home_numel, run.returning.home_numel if run.returning else 0) for run in runs)
    inbox = torch.empty(max(run.gathering.owned_numel for run in runs), device=device, dtype=dtype)
    # Where a bucket returns the way it came, its results overwrite what was received: no second buffer.
    apart = [run.returning.owned_numel for run in runs if run.returning is not None and not run.mirrored]
    outbox = torch.empty(max(apart), device=device, dtype=dtype) if apart else inbox
    most = max(0 if run.spreading is None else run.spreading.owned_numel for run in runs)
    shared = torch.empty(most, device=device, dtype=dtype)
    return Slot(torch.empty(home, device=device, dtype=dtype), inbox, outbox, shared)
