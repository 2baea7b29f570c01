"""The buffers of a step, allocated only during a step, and the asynchronous collectives between them.

An exchange gathers sharded matrices at the owners and returns the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.intervals import Span, spans
from ..layout.types import Plan
from ..program.phases import BucketProgram, Collective, Parcel, Phase, aligned
from ..program.program import Program
from ..tensors.dtensor import is_host
from .agreement import Agreement

# PyTorch 2.13 renamed two functions, and the old names warn.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def add(self, tensor: Tensor) -> None:
        """Include the memory of a tensor."""
        self._sizes[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.free()

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


class PassedOn(NamedTuple):
    """What passes through this rank between two hops: buffers, and the same parts as they arrive and as they leave."""

    arriving: Tensor
    departing: Tensor
    arrived: list[Tensor]
    leaving: list[Tensor]


@dataclass(frozen=True)
class BucketBuffers:
    """The flat buffers of a bucket in flight, all parts of the bytes of `block`, and this rank's pieces in them.

    Attributes:
        home: stored pieces.
        inbox: pieces received for this owner.
        results: results to send back; the inbox if the return mirrors the gather.
        shared: results after the spread among replicas.
        stored: every stored piece; the result arrives in the view.
        packed: by matrix, the view for the piece to send.
        sources: gathered pieces by matrix.
        targets: by matrix, the views for orthogonalized pieces.
        cleared: buffer to zero before the targets are filled, or None.
        passed: of two hops.
    """

    block: Tensor
    home: Tensor
    inbox: Tensor
    results: Tensor
    shared: Tensor
    stored: tuple[BufferPiece, ...]
    packed: Mapping[int, Tensor]
    sources: Mapping[int, tuple[BufferPiece, ...]]
    targets: Mapping[int, tuple[BufferPiece, ...]]
    cleared: Tensor | None
    passed: PassedOn | None = None


def bucket_buffers(
    program: Program, device: torch.device, dtypes: Sequence[torch.dtype]
) -> tuple[BucketBuffers | None, ...]:
    """The buffers of each bucket, with the bucket's dtype; None for a local bucket. Rounds share memory."""
    travelling = [(program.buffer_set(index), run) for index, run in enumerate(program.buckets) if not run.local]
    sizes: dict[tuple[int, int], tuple[int, ...]] = {}
    for (place, run), dtype in zip(travelling, dtypes, strict=False):
        parts = [dtype.itemsize * aligned(numel) for numel in run.buffers]
        sizes[place] = tuple(map(max, sizes.get(place, parts), parts))
    # A single block is easier to allocate than several.
    blocks = {place: torch.empty(sum(parts), device=device, dtype=torch.uint8) for place, parts in sizes.items()}
    made = list[BucketBuffers | None]()
    for (place, run), dtype in zip(travelling, dtypes, strict=False):
        in_block = zip(blocks[place].split(sizes[place]), run.buffers, strict=True)
        made.append(_in_block(run, program.rank, blocks[place], (p.view(dtype)[:numel] for p, numel in in_block)))
    return (*made, *[None] * len(program.local))


def _in_block(run: BucketProgram, rank: int, block: Tensor, parts: Iterable[Tensor]) -> BucketBuffers:
    """`parts` of the block: as `BucketProgram.buffers`."""
    home, inbox, outbox, shared, arriving, departing = parts
    gathering, returning, hop = run.gathering, run.returning, run.gathering.hop
    results = inbox if run.mirrored else outbox
    stored = _pieces(run.stored, home if run.replica_gather is None else shared)
    targets: Mapping[int, tuple[BufferPiece, ...]]
    if returning is None:
        targets = {piece.matrix: (piece,) for piece in stored}
    else:
        targets = _by_matrix(run, returning, results, home, rank)
    packed = {piece.matrix: piece.view for piece in _pieces(gathering.home, home) if piece.view is not None}
    assert len(packed) == len(gathering.home), "a rank sends a piece to one owner"
    # A reduce-scatter sums results, so matrices of other owners need zeros.
    summed = returning is not None and returning.collective is Collective.REDUCE_SCATTER
    sources, cleared = _by_matrix(run, gathering, inbox, home, rank), outbox if summed else None
    passed = None
    if hop is not None:
        # Parts arrive by node, and depart by owner.
        width, by_node = len(hop.node), arriving.split(list(chain(*hop.passed)))
        arrived = [part for owner in range(width) for part in by_node[owner::width] if part.numel()]
        passed = PassedOn(arriving, departing, arrived, list(departing.split([part.numel() for part in arrived])))
    return BucketBuffers(block, home, inbox, results, shared, stored, packed, sources, targets, cleared, passed)


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
        self.buckets = bucket_buffers(program, device, dtypes)
        self.memory = StepMemory(self.tensors, kept=kept)

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (buffers.block for buffers in self.buckets if buffers is not None)


def wire_dtypes(plan: Plan, program: Program) -> tuple[torch.dtype, ...]:
    """The dtype of matrices in transit, by bucket."""
    return tuple(WIRE_DTYPES[plan.wire_bytes(run.bucket)] for run in program.buckets)


@dataclass
class Traffic:
    """Collectives and bytes sent by this rank."""

    calls: int = 0
    bytes_sent: int = 0

    def add(self, sent: int) -> None:
        self.calls += 1
        self.bytes_sent += sent


Splits = Sequence[int]


class Collectives:
    """Transport of exchanges.

    Buffers are flat, on one device and of one dtype. Splits count the elements of each rank, in order. Methods start a
    collective and return the handles to wait for.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_to_all(
        self, output: Tensor, output_splits: Splits, input: Tensor, input_splits: Splits, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Send part i of `input` to rank i, and fill `output` with the received parts."""
        output, input = output[: sum(output_splits)], input[: sum(input_splits)]
        # Of two hops, a rail has parts for this rank itself, and so has a node.
        self.traffic.add(input.nbytes - input_splits[dist.get_rank(group)] * input.element_size())
        splits = list(output_splits), list(input_splits)
        return [dist.all_to_all_single(output, input, *splits, group=group, async_op=True)]

    def all_gather(self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `output` with the inputs of all ranks."""
        sent = input.numel() * input.element_size() * (len(splits) - 1)
        if len(set(splits)) == 1:
            self.traffic.add(sent)
            return [_gather_equal(output[: sum(splits)], input, group=group, async_op=True)]
        parts = list(output[: sum(splits)].split(list(splits)))
        if not is_host(input.device):
            return self.all_gather_uneven(parts, input, group)
        # gloo's all-gather takes only equal parts.
        me = dist.get_rank(group)
        parts[me].copy_(input)
        works = []
        for source, part in enumerate(parts):
            if part.numel() > 0:
                self.traffic.add(sent if source == me else 0)
                works.append(dist.broadcast(part, group_src=source, group=group, async_op=True))
        return works

    def all_gather_uneven(self, parts: list[Tensor], input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `parts` with the inputs of all ranks, by direct sends in a single launch."""
        # NCCL's own gather of different sizes takes a broadcast for each rank.
        self.traffic.add(input.nbytes * (len(parts) - 1))
        me = dist.get_rank(group)
        parts[me].copy_(input)
        peers = [(rank, part) for rank, part in enumerate(parts) if rank != me]
        sends = [dist.P2POp(dist.isend, input, group=group, group_peer=r) for r, _ in peers if input.numel() > 0]
        receives = [dist.P2POp(dist.irecv, part, group=group, group_peer=r) for r, part in peers if part.numel() > 0]
        return dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

    def reduce_scatter(
        self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Fill `output` with this rank's part of the sum of `input` over all ranks."""
        self.traffic.add((sum(splits) - splits[dist.get_rank(group)]) * input.element_size())
        if len(set(splits)) == 1:
            return [_scatter_equal(output, input[: sum(splits)], group=group, async_op=True)]
        parts = list(input[: sum(splits)].split(list(splits)))
        return [dist.reduce_scatter(output, parts, group=group, async_op=True)]

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Sum over all ranks, in place. The traffic counts the bytes of a ring all-reduce."""
        ranks = dist.get_world_size(group)
        self.traffic.add(2 * (ranks - 1) * tensor.nbytes // ranks)
        return [dist.all_reduce(tensor, group=group, async_op=True)]


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for collectives: on gloo the host waits, on NCCL the current stream."""
    for work in works:
        work.wait()


class Exchange:
    """Runs the collectives of a program."""

    def __init__(self, program: Program, buffers: Buffers, collectives: Collectives, agreement: Agreement) -> None:
        self._runs, self.collectives = program.buckets, collectives
        self._buffers = {index: bucket for index, bucket in enumerate(buffers.buckets) if bucket is not None}
        phases = [phase for run in self._runs for phase in run.phases[:2] if phase.travels]
        groups = [(p.group,) if p.hop is None else (p.hop.rail, p.hop.node) for p in phases]
        self._groups = {ranks: agreement.group(ranks) for ranks in chain(*groups)}
        gathers = [run.replica_gather for run in self._runs if run.replica_gather is not None]
        self._replica_groups = {phase.group: agreement.group(phase.group) for phase in gathers if phase.travels}
        self._module: Any = torch.get_device_module(buffers.device)
        self._stream = self._module.Stream()
        self._pending: dict[int, list[dist.Work]] = {}

    def warm_up(self, plan: Plan) -> None:
        """Run the largest bucket of each group once, because NCCL opens connections by message size. Collective."""
        largest: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        for index, run in enumerate(self._runs):
            # By sizes of whole matrices, all ranks of a group choose the same bucket.
            size = plan.wire_bytes(run.bucket) * sum(plan.matrices[matrix].numel for matrix in run.bucket.matrices)
            group = run.bucket.exchange, run.bucket.group
            largest[group] = max(largest.get(group, (0, 0)), (size, -index))
        for index in sorted(-negative for _, negative in largest.values()):
            self.gather(index)
            self.wait(index)
            self.return_results(index)
            self.wait(index)
        self.collectives.traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        return self.collectives.traffic

    def gather(self, index: int) -> None:
        """Start to send the packed pieces of a bucket to the owners."""
        phase = self._runs[index].gathering
        if not phase.travels:
            return
        buffers = self._buffers[index]
        if phase.collective is Collective.ALL_TO_ALL:
            self._pending[index] = self._send(phase, buffers, buffers.inbox)
        else:
            sent, group = buffers.home[: phase.home_numel], self._groups[phase.group]
            self._pending[index] = self.collectives.all_gather(buffers.inbox, phase.owned_splits, sent, group)

    def return_results(self, index: int) -> None:
        """Start to send the results of a bucket to the holders."""
        run = self._runs[index]
        phase, works = run.returning, list[dist.Work]()
        if phase is not None and phase.travels:
            buffers = self._buffers[index]
            if phase.collective is Collective.ALL_TO_ALL:
                works = self._send(phase, buffers, buffers.results, back=True)
            else:
                received, group = buffers.home[: phase.home_numel], self._groups[phase.group]
                works = self.collectives.reduce_scatter(received, phase.owned_splits, buffers.results, group)
        if run.replica_gather is not None and run.replica_gather.travels:
            works = self._spread(run.replica_gather, self._buffers[index], works)
        if works:
            self._pending[index] = works

    def _send(self, phase: Phase, buffers: BucketBuffers, owned: Tensor, *, back: bool = False) -> list[dist.Work]:
        """Start the all-to-all, or the all-to-alls of two hops, from the holders to the owners; or `back`."""
        home, hop, passed = (buffers.home[phase.kept :], phase.home_splits), phase.hop, buffers.passed
        legs = [(home, (owned, phase.owned_splits), phase.group)]
        if hop is not None and passed is not None:
            legs = [
                (home, (passed.arriving, hop.arriving_splits), hop.rail),
                ((passed.departing, hop.departing_splits), (owned, phase.owned_splits), hop.node),
            ]
        works = list[dist.Work]()
        for number, (source, target, ranks) in enumerate(reversed(legs) if back else legs):
            source, target = (target, source) if back else (source, target)
            with self._behind(works) if number else nullcontext():
                if number and passed is not None and passed.arrived:
                    ends = (passed.arrived, passed.leaving) if back else (passed.leaving, passed.arrived)
                    torch._foreach_copy_(*ends)
                works = self.collectives.all_to_all(*target, *source, self._groups[ranks])
        return works

    def _spread(self, phase: Phase, buffers: BucketBuffers, before: Sequence[dist.Work]) -> list[dist.Work]:
        with self._behind(before):
            group = self._replica_groups[phase.group]
            return self.collectives.all_gather(
                buffers.shared, phase.owned_splits, buffers.home[: phase.home_numel], group
            )

    @contextmanager
    def _behind(self, works: Sequence[dist.Work]) -> Iterator[None]:
        """A stream behind this one and the works; on gloo the host waits for these."""
        # On a separate stream, so that the computing stream goes on with the next round.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            wait_all(works)
            yield

    def wait(self, index: int) -> None:
        for work in self._pending.pop(index, ()):
            work.wait()


def move(source: Tensor, target: Tensor, old: Sequence[int], new: Sequence[int]) -> None:
    """Copy a tensor from the global ranks `old` to the ranks `new`. Collective over these ranks. The host waits."""
    this_rank = dist.get_rank() if dist.is_initialized() else 0
    for rank in new:
        if rank in old:
            if rank == this_rank:
                target.copy_(source)
        elif this_rank == old[0]:
            dist.send(source.to(target.dtype), rank)
        elif this_rank == rank:
            dist.recv(target, old[0])
