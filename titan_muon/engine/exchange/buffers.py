"""The exchange buffers of a step, allocated only during a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.intervals import Span, spans
from ..layout.types import Plan
from ..program.phases import BucketProgram, Collective, Parcel, Phase, aligned
from ..program.program import Program

WIRE_DTYPES: Mapping[int, torch.dtype] = {2: torch.bfloat16, 4: torch.float32}


class StepMemory:
    """Memory of `tensors`, allocated only during a step unless `kept`."""

    def __init__(self, tensors: Iterable[Tensor], *, kept: bool) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes, self._kept = {storage: storage.nbytes() for storage in storages}, kept
        self.free()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def take(self) -> None:
        # Resizing always moves a storage, and collectives in flight would write to freed memory.
        for storage, size in self._sizes.items():
            if storage.nbytes() != size:
                storage.resize_(size)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the memory while views are made: PyTorch makes no views of an empty storage."""
        # Not all memory, because a gather before the step may be reading it.
        missing = [storage for storage, size in self._sizes.items() if storage.nbytes() != size]
        self.take()
        yield
        for storage in missing:
            storage.resize_(0)

    def free(self, *, kept: bool = False) -> None:
        """Free the memory, `kept` memory only if asked. The current stream must have waited for uses on other streams.

        The next `take` allocates the memory again.
        """
        for storage in () if self._kept and not kept else self._sizes:
            storage.resize_(0)


LARGE_BYTES = 2**28
"""Step memory from which on fragments matter."""


def fragmentation(device: str, nbytes: int, environ: Mapping[str, str]) -> str:
    """A warning if the allocator fragments step memory of `nbytes`; else empty."""
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = ",".join(environ.get(name, "") for name in variables).replace(" ", "").lower()
    whole = "expandable_segments:true" in settings or "backend:cudamallocasync" in settings
    if device != "cuda" or nbytes < LARGE_BYTES or whole:
        return ""
    return (
        f"each Muon step allocates and frees {nbytes / 2**20:,.0f} MiB of buffers, and fragments of CUDA's memory can "
        "make that slow; set PYTORCH_ALLOC_CONF=expandable_segments:True, or keep_buffers = True"
    )


class BufferPiece(NamedTuple):
    """A piece of a matrix, see [Note: pieces], and its 2D view in a buffer.

    `spans`: rectangles of the parameter. `view`: None for a piece that another rank packs.
    """

    matrix: int
    spans: tuple[Span, ...]
    view: Tensor | None


@dataclass(frozen=True)
class BufferSet:
    """The flat buffers of a bucket in flight, all parts of the bytes of `block`.

    Attributes:
        home: stored pieces.
        inbox: pieces received for this owner.
        outbox: results to send back.
        shared: results after the spread among replicas.
    """

    block: Tensor
    home: Tensor
    inbox: Tensor
    outbox: Tensor
    shared: Tensor

    def leaving(self, run: BucketProgram) -> Tensor:
        """The buffer of the results: the inbox if the return mirrors the gather."""
        return self.inbox if run.mirrored else self.outbox


@dataclass(frozen=True)
class BucketBuffers:
    """This rank's pieces of a bucket, as views of a buffer set.

    Attributes:
        stored: every stored piece; the result arrives in the view.
        packed: by matrix, the view for the piece to send.
        sources: gathered pieces by matrix.
        targets: by matrix, the views for orthogonalized pieces.
        cleared: buffer to zero before the targets are filled, or None.
    """

    stored: tuple[BufferPiece, ...]
    packed: Mapping[int, Tensor]
    sources: Mapping[int, tuple[BufferPiece, ...]]
    targets: Mapping[int, tuple[BufferPiece, ...]]
    cleared: Tensor | None


def bucket_buffers(run: BucketProgram, rank: int, buffer_set: BufferSet) -> BucketBuffers:
    """The views of a bucket in a buffer set."""
    gathering, returning = run.gathering, run.returning
    arrived = buffer_set.home if run.replica_gather is None else buffer_set.shared
    stored = _pieces(run.stored, arrived)
    targets: Mapping[int, tuple[BufferPiece, ...]]
    if returning is None:
        targets = {piece.matrix: (piece,) for piece in stored}
    else:
        targets = _by_matrix(run, returning, buffer_set.leaving(run), buffer_set.home, rank)
    home = _pieces(gathering.home, buffer_set.home)
    packed = {piece.matrix: piece.view for piece in home if piece.view is not None}
    assert len(packed) == len(gathering.home), "a rank sends a piece to one owner"
    # A reduce-scatter sums results, so matrices of other owners need zeros.
    summed = returning is not None and returning.collective is Collective.REDUCE_SCATTER
    return BucketBuffers(
        stored,
        packed,
        _by_matrix(run, gathering, buffer_set.inbox, buffer_set.home, rank),
        targets,
        buffer_set.outbox if summed else None,
    )


def _by_matrix(
    run: BucketProgram, phase: Phase, buffer: Tensor, home: Tensor, rank: int
) -> dict[int, tuple[BufferPiece, ...]]:
    """This owner's pieces by matrix. In an all-to-all, own pieces stay in the home buffer."""
    own = [parcel for parcel in phase.home if phase.collective is Collective.ALL_TO_ALL and parcel.peer == rank]
    by_matrix: dict[int, list[BufferPiece]] = {matrix: [] for matrix in run.matrices}
    for piece in (*_pieces(phase.owned, buffer), *_pieces(own, home)):
        # An all-gather also brings pieces for another owner.
        if piece.matrix in by_matrix:
            by_matrix[piece.matrix].append(piece)
    return {matrix: tuple(pieces) for matrix, pieces in by_matrix.items()}


def _pieces(parcels: Iterable[Parcel], buffer: Tensor) -> tuple[BufferPiece, ...]:
    return tuple(
        BufferPiece(p.matrix, spans(p.piece), buffer[p.offset : p.offset + p.piece.numel].view(p.piece.shape))
        for p in parcels
    )


class Buffers:
    """The flat buffers of a program, and views of every piece, by bucket; none for a local bucket."""

    def __init__(
        self, program: Program, device: torch.device, dtypes: Sequence[torch.dtype], *, kept: bool = False
    ) -> None:
        self.device, self.dtypes = device, tuple(dtypes)
        self.buffer_sets = make_buffer_sets(program, device, dtypes)
        self.buckets = tuple(
            None if run.local else bucket_buffers(run, program.rank, buffer_set)
            for run, buffer_set in zip(program.buckets, self.buffer_sets, strict=True)
        )
        self.memory = StepMemory(self.tensors, kept=kept)

    @property
    def tensors(self) -> Iterator[Tensor]:
        for buffer_set in self.buffer_sets:
            yield buffer_set.block


def wire_dtypes(plan: Plan, program: Program) -> tuple[torch.dtype, ...]:
    """The dtype of matrices in transit, by bucket."""
    return tuple(WIRE_DTYPES[plan.wire_bytes(run.bucket)] for run in program.buckets)


def make_buffer_sets(program: Program, device: torch.device, dtypes: Sequence[torch.dtype]) -> tuple[BufferSet, ...]:
    """The buffer set of each bucket, with the bucket's dtype. Rounds share memory. Local buckets get empty buffers."""
    places = [None if run.local else program.buffer_set(index) for index, run in enumerate(program.buckets)]
    numels = [(0, 0, 0, 0) if run.local else _numels(run) for run in program.buckets]
    largest: dict[tuple[int, int] | None, tuple[int, ...]] = {}
    for place, parts, dtype in zip(places, numels, dtypes, strict=True):
        sizes = [dtype.itemsize * aligned(numel) for numel in parts]
        largest[place] = tuple(map(max, largest.get(place, sizes), sizes))
    # A single block is easier to allocate than four.
    blocks = {place: torch.empty(sum(sizes), device=device, dtype=torch.uint8) for place, sizes in largest.items()}
    result = []
    for place, parts, dtype in zip(places, numels, dtypes, strict=True):
        in_block = zip(blocks[place].split(largest[place]), parts, strict=True)
        result.append(BufferSet(blocks[place], *(part.view(dtype)[:numel] for part, numel in in_block)))
    return tuple(result)


def _numels(run: BucketProgram) -> tuple[int, int, int, int]:
    """Elements of the four buffers of a set."""
    returned, spread = run.returning, run.replica_gather
    return (
        max(phase.home_numel for phase in (run.gathering, returned) if phase is not None),
        run.gathering.owned_numel,
        # A mirrored return overwrites the received pieces: no second buffer.
        0 if returned is None or run.mirrored else returned.owned_numel,
        0 if spread is None else spread.owned_numel,
    )
