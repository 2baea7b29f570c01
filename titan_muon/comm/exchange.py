"""Buffers and collectives that assemble sharded matrices at their owners and bring the results back.

Every collective is asynchronous: `wait` blocks the host on gloo, and only the current stream on NCCL, whose own stream
carries the transfer. Buffers and their views are made once and used by every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.exchange.phases import BucketProgram, Collective, Leg, Parcel
from ..plan.program import Program
from ..plan.terms.layout import Span, spans
from .agreement import Agreement

# PyTorch 2.13 renamed these; the old names, all that 2.11 has, warn from then on.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Traffic:
    """What the exchange has sent from this rank since it was built: collectives launched, bytes to other ranks."""

    calls: int = 0
    bytes_sent: int = 0

    def add(self, sent: int) -> None:
        """Count one collective."""
        self.calls += 1
        self.bytes_sent += sent


Splits = Sequence[int]


@dataclass(frozen=True)
class BufferPiece:
    """A piece of a matrix (see [Note: pieces] in plan/types.py): its 2D view in a buffer, and its rectangles."""

    matrix: int
    view: Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Slot:
    """Flat buffers of one bucket in flight: pieces stored here, pieces received, pieces to send back, and pieces that
    copies share, all of those stored here."""

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


class Collectives:
    """The collectives of exchanges and of gradients; a package may register a subclass that runs them otherwise.

    Buffers are flat, on one device and of one dtype. Splits are elements for each rank of the group, in its order.
    Every method starts its collective and returns what there is to wait for.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_to_all(
        self, output: Tensor, output_splits: Splits, input: Tensor, input_splits: Splits, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Send the parts of `input` to the ranks of the group and fill `output` with what they send."""
        received, sent = sum(output_splits), sum(input_splits)
        self.traffic.add(sent * input.element_size())
        work = dist.all_to_all_single(
            output[:received], input[:sent], list(output_splits), list(input_splits), group=group, async_op=True
        )
        return [work]

    def all_gather(self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `output` with the inputs of all ranks, this one's included; `splits` may differ."""
        sent = input.numel() * input.element_size() * (len(splits) - 1)
        if len(set(splits)) == 1:
            self.traffic.add(sent)
            return [_gather_equal(output[: sum(splits)], input, group=group, async_op=True)]
        parts = list(output[: sum(splits)].split(list(splits)))
        if input.is_cuda:
            self.traffic.add(sent)
            return [dist.all_gather(parts, input, group=group, async_op=True)]
        # gloo's all-gather takes equal parts only, so each rank broadcasts its own; an empty part needs no broadcast.
        me = dist.get_rank(group)
        parts[me].copy_(input)
        works = []
        for source, part in enumerate(parts):
            if part.numel() > 0:
                self.traffic.add(sent if source == me else 0)
                works.append(dist.broadcast(part, group_src=source, group=group, async_op=True))
        return works

    def reduce_scatter(
        self, output: Tensor, splits: Splits, input: Tensor, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        """Fill `output` with the sum over all ranks of the part of `input` that is this rank's."""
        self.traffic.add((sum(splits) - splits[dist.get_rank(group)]) * input.element_size())
        if len(set(splits)) == 1:
            return [_scatter_equal(output, input[: sum(splits)], group=group, async_op=True)]
        parts = list(input[: sum(splits)].split(list(splits)))
        return [dist.reduce_scatter(output, parts, group=group, async_op=True)]

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Fill `tensor` with its sum over all ranks. Counted is what a ring sends, and its calls as one."""
        ranks = dist.get_world_size(group)
        self.traffic.add(2 * (ranks - 1) * tensor.nbytes // ranks)
        return [dist.all_reduce(tensor, group=group, async_op=True)]


class Team:
    """The owners of the slices of a matrix, for `orthogonalize.sliced`.

    Args:
        ranks: owners, in the order of the slices, which is ascending.
        rank: this one.
        collectives: transport.
        group: process group of the ranks.
    """

    # Teams overlap, and one that waits holds up all others of its ranks. None waits forever: every rank comes to its
    # teams in one order, by the turns of the program, which are the same on all ranks, by the buckets of a round in the
    # order of the plan, and in a bucket by the numbers of the matrices (`batches`). Of all teams that are waited for,
    # the first in that order has only ranks that wait for no other, and goes on.

    def __init__(self, ranks: tuple[int, ...], rank: int, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self.place, self._size = ranks.index(rank), len(ranks)
        self._collectives, self._group = collectives, group

    def summed(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of `whole` (rows, cols) over the team; a k-th of them, in order."""
        part = whole.new_empty(whole.size(0) // self._size, whole.size(1))
        splits = [part.numel()] * self._size
        _finish(self._collectives.reduce_scatter(part.view(-1), splits, whole.view(-1), self._group))
        return part

    def gathered(self, part: Tensor) -> Tensor:
        """The tensors of all ranks, in order, joined along the first dim."""
        whole = part.new_empty(self._size * part.size(0), *part.shape[1:])
        splits = [part.numel()] * self._size
        _finish(self._collectives.all_gather(whole.view(-1), splits, part.view(-1), self._group))
        return whole


def _finish(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


class Exchange:
    """Runs the collectives of a program.

    Args:
        program: this rank's part of the plan.
        device: device that holds the buffers.
        dtype: dtype of the elements in transit.
        collectives: transport of the buffers.
        agreement: owner of the process groups.
        apart: whether buckets travel over process groups that nothing else uses.

    Attributes:
        buckets: where the pieces of each of the program's buckets are.
        teams: for each slice of a matrix that this rank orthogonalizes, the owners of all of them.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        dtype: torch.dtype,
        collectives: Collectives,
        agreement: Agreement,
        *,
        apart: bool,
    ) -> None:
        self._runs = program.buckets
        group = agreement.group_apart if apart else agreement.group
        self._groups = {leg.group: group(leg.group) for run in self._runs for leg in run.legs[:2] if leg.travels}
        spreading = [run.spreading for run in self._runs if run.spreading is not None]
        self._lines = {leg.group: agreement.group(leg.group) for leg in spreading if leg.travels}
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self.teams = {
            matrix: Team(ranks, program.rank, collectives, agreement.group(ranks))
            for matrix, ranks in program.teams.items()
        }
        self._collectives = collectives
        self._pending: dict[int, list[dist.Work]] = {}
        self._slots = make_slots(program, device, dtype)
        self.buckets = tuple(bucket_buffers(r, program.rank, s) for r, s in zip(self._runs, self._slots, strict=True))

    @property
    def buffers(self) -> Iterator[Tensor]:
        """All buffers, some of them several times."""
        for slot in self._slots:
            yield from (slot.home, slot.inbox, slot.outbox, slot.shared)

    @property
    def traffic(self) -> Traffic:
        """What has been sent from this rank."""
        return self._collectives.traffic

    def gather(self, index: int) -> None:
        """Send the pieces in the home buffer to where they are orthogonalized."""
        run, slot = self._runs[index], self._slots[index]
        leg = run.gathering
        if not leg.travels:
            return
        group = self._groups[leg.group]
        if leg.collective is Collective.ALL_TO_ALL:
            # What this rank owns itself lies first in its home buffer, and never travels.
            sent = slot.home[leg.kept :]
            works = self._collectives.all_to_all(slot.inbox, leg.owned_splits, sent, leg.home_splits, group)
        else:
            works = self._collectives.all_gather(slot.inbox, leg.owned_splits, slot.home[: leg.home_numel], group)
        self._pending[index] = works

    def return_results(self, index: int) -> None:
        """Send the orthogonalized pieces back to the buffers of all that store them."""
        run, slot = self._runs[index], self._slots[index]
        works = [] if run.returning is None or not run.returning.travels else self._return(run, run.returning, slot)
        if run.spreading is not None and run.spreading.travels:
            works = self._spread(run.spreading, slot, works)
        if works:
            self._pending[index] = works

    def _return(self, run: BucketProgram, leg: Leg, slot: Slot) -> list[dist.Work]:
        group = self._groups[leg.group]
        if leg.collective is Collective.ALL_TO_ALL:
            received = slot.home[leg.kept :]
            return self._collectives.all_to_all(received, leg.home_splits, slot.leaving(run), leg.owned_splits, group)
        received = slot.home[: leg.home_numel]
        return self._collectives.reduce_scatter(received, leg.owned_splits, slot.outbox, group)

    def _spread(self, leg: Leg, slot: Slot, before: Sequence[dist.Work]) -> list[dist.Work]:
        # On a stream of its own, which waits for the return: the computing one goes on with the next round.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            _finish(before)
            group = self._lines[leg.group]
            return self._collectives.all_gather(slot.shared, leg.owned_splits, slot.home[: leg.home_numel], group)

    def wait(self, index: int) -> None:
        """Wait for the last collective of bucket number `index` of the program."""
        _finish(self._pending.pop(index, []))


def make_slots(program: Program, device: torch.device, dtype: torch.dtype) -> tuple[Slot, ...]:
    """The buffers of each bucket; buckets of other rounds may have the same ones."""
    sharing: dict[tuple[int, int], list[BucketProgram]] = {}
    for index, run in enumerate(program.buckets):
        sharing.setdefault(program.slot(index), []).append(run)
    made = {place: _slot(runs, device, dtype) for place, runs in sharing.items()}
    return tuple(made[program.slot(index)] for index in range(len(program.buckets)))


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
