"""How the pieces of matrices meet and part again: the optimizer's only collectives.

Every collective is asynchronous: `wait` blocks the host on gloo, and only the current stream on NCCL, whose own stream
carries the transfer. Buffers are allocated once and used by every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .plan.program import Leg, Parcel, Program, Run
from .plan.types import Piece, Plan

# PyTorch 2.13 renamed these; the old names, all that 2.11 has, warn from then on.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Parked:
    """A piece of a matrix and its (rows, columns) view in a buffer."""

    matrix: int
    piece: Piece
    view: Tensor


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
class Slot:
    """Flat buffers of one bucket in flight: pieces stored here, pieces received, and pieces to send back."""

    home: Tensor
    inbox: Tensor
    outbox: Tensor

    def leaving(self, run: Run) -> Tensor:
        """The buffer that a run's orthogonalized pieces leave from: where they came in, if they go the same way."""
        return self.inbox if run.mirrored else self.outbox


class Load:
    """Where the pieces of one bucket are in the buffers of its slot, on this rank.

    Attributes:
        stored: each piece that rests here, in the home buffer when the bucket is back.
        packed: matrix -> view to fill with the piece that rests here, for those pieces that are gathered from here.
        sources: matrix -> the pieces that make it whole, once gathered.
        targets: matrix -> the views to fill with its orthogonalized pieces.
        cleared: a buffer to set to zero before its targets are filled, or None.
    """

    def __init__(self, run: Run, rank: int, slot: Slot) -> None:
        gathering, returning = run.gathering, run.returning
        self.matrices = run.matrices
        self.stored = _parked(run.held, slot.home)
        self.packed = {parked.matrix: parked.view for parked in _parked(gathering.home, slot.home)}
        own = run.bucket.exchange == "all_to_all"
        self.sources = self._by_matrix(gathering, slot.inbox, slot.home, rank, own)
        self.targets: dict[int, tuple[Parked, ...]] = (
            {parked.matrix: (parked,) for parked in self.stored}
            if returning is None
            else self._by_matrix(returning, slot.leaving(run), slot.home, rank, own)
        )
        self.cleared = slot.outbox if run.bucket.exchange == "all_gather_reduce_scatter" else None

    def _by_matrix(self, leg: Leg, buffer: Tensor, home: Tensor, rank: int, own: bool) -> dict[int, tuple[Parked, ...]]:
        """Pieces at the owner; in an all-to-all the owner's own pieces never left its home buffer."""
        kept = [parcel for parcel in leg.home if own and parcel.peer == rank]
        found: dict[int, list[Parked]] = {matrix: [] for matrix in self.matrices}
        for parked in (*_parked(leg.owned, buffer), *_parked(kept, home)):
            if parked.matrix in found:
                found[parked.matrix].append(parked)
        return {matrix: tuple(pieces) for matrix, pieces in found.items()}


def _parked(parcels: Iterable[Parcel], buffer: Tensor) -> tuple[Parked, ...]:
    return tuple(
        Parked(p.matrix, p.piece, buffer[p.offset : p.offset + p.piece.numel].view(p.piece.shape)) for p in parcels
    )


class Collectives:
    """The three collectives of exchanges; a package may register a subclass that runs them otherwise.

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
        if dist.get_backend(group) == "nccl":
            self.traffic.add(sent)
            return [dist.all_gather(parts, input, group=group, async_op=True)]
        # gloo gathers equal parts only; a broadcast from each rank is its ragged all-gather.
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


class Exchange:
    """Runs the collectives of a program.

    Args:
        program: what this rank does.
        device: of the buffers.
        dtype: of the elements in transit.
        collectives: what carries the buffers.
        groups: where process groups come from.
    """

    def __init__(
        self, program: Program, device: torch.device, dtype: torch.dtype, collectives: Collectives, groups: Groups
    ) -> None:
        self._groups = tuple(groups.of(run.bucket.group) for run in program.runs)
        self._collectives = collectives
        self._pending: dict[int, list[dist.Work]] = {}
        self._runs = program.runs
        slots = tuple(_slot(program, index, device, dtype) for index in range(program.slots))
        self._slots = tuple(slots[index % program.slots] for index in range(len(program.runs)))
        self.loads = tuple(Load(run, program.rank, slot) for run, slot in zip(self._runs, self._slots, strict=True))

    @property
    def traffic(self) -> Traffic:
        """What has been sent from this rank."""
        return self._collectives.traffic

    def gather(self, index: int) -> None:
        """Send the pieces in the home buffer to where they are orthogonalized."""
        run, slot = self._runs[index], self._slots[index]
        leg, group = run.gathering, self._groups[index]
        if run.bucket.exchange == "all_to_all":
            sent = slot.home[leg.kept :]
            works = self._collectives.all_to_all(slot.inbox, leg.owned_splits, sent, leg.home_splits, group)
        else:
            works = self._collectives.all_gather(slot.inbox, leg.owned_splits, slot.home[: leg.home_numel], group)
        self._pending[index] = works

    def return_(self, index: int) -> None:
        """Send the orthogonalized pieces back to the home buffers of all that store them."""
        run, slot = self._runs[index], self._slots[index]
        leg, group = run.returning, self._groups[index]
        if leg is None:
            return
        if run.bucket.exchange == "all_to_all":
            received = slot.home[leg.kept :]
            works = self._collectives.all_to_all(received, leg.home_splits, slot.leaving(run), leg.owned_splits, group)
        else:
            received = slot.home[: leg.home_numel]
            works = self._collectives.reduce_scatter(received, leg.owned_splits, slot.outbox, group)
        self._pending[index] = works

    def wait(self, index: int) -> None:
        """Wait for the last collective of run number `index`."""
        for work in self._pending.pop(index, []):
            work.wait()


def _slot(program: Program, index: int, device: torch.device, dtype: torch.dtype) -> Slot:
    """Buffers large enough for every run that will use this slot."""
    runs = program.runs[index :: program.slots]
    home = max(max(run.gathering.home_numel, run.returning.home_numel if run.returning else 0) for run in runs)
    inbox = torch.empty(max(run.gathering.owned_numel for run in runs), device=device, dtype=dtype)
    apart = [run.returning.owned_numel for run in runs if run.returning is not None and not run.mirrored]
    outbox = torch.empty(max(apart), device=device, dtype=dtype) if apart else inbox
    return Slot(torch.empty(home, device=device, dtype=dtype), inbox, outbox)


class Groups:
    """Process groups by their ranks, each made once, when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._hosts: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of these ranks, all of which must ask for it."""
        if ranks not in self._known:
            self._known[ranks] = _new_group(ranks, None)
        return self._known[ranks]

    def of_hosts(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The same for words between hosts, which must not wait for a device: NCCL's groups do."""
        if dist.get_backend() != "nccl":
            return self.of(ranks)
        if ranks not in self._hosts:
            self._hosts[ranks] = _new_group(ranks, "gloo")
        return self._hosts[ranks]


def _new_group(ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group is there when ranks meet"
    if backend is None and len(ranks) == dist.get_world_size():
        return world
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


class Council:
    """All ranks that meet anywhere in a plan, agreeing on their hosts before they exchange anything."""

    def __init__(self, plan: Plan, rank: int, groups: Groups) -> None:
        self._ranks = tuple(sorted({member for bucket in plan.buckets for member in bucket.group}))
        self._group = groups.of_hosts(self._ranks) if rank in self._ranks else None

    def check(self, signature: str, fault: str | None) -> None:
        """Raise ValueError on every rank if one has a fault, or if their signatures of the same step differ."""
        said: list[tuple[str, str | None]] = [(signature, fault)]
        ranks: Sequence[int] = (0,)
        if self._group is not None:
            ranks, said = self._ranks, [("", None)] * len(self._ranks)
            dist.all_gather_object(said, (signature, fault), group=self._group)
        for rank, (_, wrong) in zip(ranks, said, strict=True):
            if wrong is not None:
                raise ValueError(wrong if fault is not None else f"on rank {rank}: {wrong}")
        different = [rank for rank, (other, _) in zip(ranks, said, strict=True) if other != said[0][0]]
        if different:
            raise ValueError(
                f"ranks {different} planned another Muon step than rank {ranks[0]}: build the optimizer on every rank "
                "from the same parameters, in the same order, with the same hyperparameters"
            )

    def worst(self, codes: Sequence[int]) -> list[int]:
        """The largest of each code, 0 to 255, over all ranks, which pass as many of them."""
        tensor = torch.tensor(codes, dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(code) for code in tensor.tolist()]
