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


@dataclass(frozen=True)
class Slot:
    """Flat buffers of one bucket in flight: pieces stored here, pieces received, and pieces to send back."""

    home: Tensor
    inbox: Tensor
    outbox: Tensor


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
            else self._by_matrix(returning, slot.outbox, slot.home, rank, own)
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


class Exchange:
    """Runs the collectives of a program.

    Args:
        plan: the plan that `program` is this rank's part of.
        program: what this rank does.
        device: of the buffers.
        dtype: of the elements in transit.

    Raises:
        ValueError: on every rank of a group whose ranks made different plans.
    """

    def __init__(self, plan: Plan, program: Program, device: torch.device, dtype: torch.dtype) -> None:
        self.traffic = Traffic()
        self._runs = program.runs
        slots = tuple(_slot(program, index, device, dtype) for index in range(program.slots))
        self._slots = tuple(slots[index % program.slots] for index in range(len(program.runs)))
        self.loads = tuple(Load(run, program.rank, slot) for run, slot in zip(self._runs, self._slots, strict=True))
        self._groups = _groups(program)
        self._pending: dict[int, list[dist.Work]] = {}
        self._everyone = _host_group(plan, program)
        _compare_digests(plan, self._groups)

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether it is set on any rank of the plan. All ranks pass the same number of flags."""
        if self._everyone is None:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._everyone)
        return [bool(flag) for flag in tensor.tolist()]

    def gather(self, index: int) -> None:
        """Send the pieces in the home buffer to where they are orthogonalized."""
        run, slot = self._runs[index], self._slots[index]
        leg, group = run.gathering, self._groups[run.bucket.group]
        if run.bucket.exchange == "all_to_all":
            works = self._all_to_all(slot.inbox, leg.owned_splits, slot.home[leg.kept :], leg.home_splits, group)
        else:
            works = self._all_gather(slot.inbox, leg, slot.home[: leg.home_numel], group)
        self._pending[index] = works

    def return_(self, index: int) -> None:
        """Send the orthogonalized pieces back to the home buffers of all that store them."""
        run, slot = self._runs[index], self._slots[index]
        leg, group = run.returning, self._groups[run.bucket.group]
        if leg is None:
            return
        if run.bucket.exchange == "all_to_all":
            works = self._all_to_all(slot.home[leg.kept :], leg.home_splits, slot.outbox, leg.owned_splits, group)
        else:
            works = self._reduce_scatter(slot.home[: leg.home_numel], slot.outbox, leg, group)
        self._pending[index] = works

    def wait(self, index: int) -> None:
        """Wait for the last collective of run number `index`."""
        for work in self._pending.pop(index, []):
            work.wait()

    def _all_to_all(
        self,
        output: Tensor,
        output_splits: Sequence[int],
        input: Tensor,
        input_splits: Sequence[int],
        group: dist.ProcessGroup,
    ) -> list[dist.Work]:
        received, sent = sum(output_splits), sum(input_splits)
        self._count(sent * input.element_size())
        work = dist.all_to_all_single(
            output[:received], input[:sent], list(output_splits), list(input_splits), group=group, async_op=True
        )
        return [work]

    def _all_gather(self, inbox: Tensor, leg: Leg, home: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        splits = leg.owned_splits
        sent = home.numel() * home.element_size() * (len(splits) - 1)
        if len(set(splits)) == 1:
            self._count(sent)
            return [dist.all_gather_into_tensor(inbox[: sum(splits)], home, group=group, async_op=True)]
        parts = list(inbox[: sum(splits)].split(list(splits)))
        if dist.get_backend(group) == "nccl":
            self._count(sent)
            return [dist.all_gather(parts, home, group=group, async_op=True)]
        # gloo gathers equal parts only; a broadcast from each rank is its ragged all-gather.
        parts[dist.get_rank(group)].copy_(home)
        works = []
        for source, part in enumerate(parts):
            if part.numel() > 0:
                self._count(sent if source == dist.get_rank(group) else 0)
                works.append(dist.broadcast(part, group_src=source, group=group, async_op=True))
        return works

    def _reduce_scatter(self, home: Tensor, outbox: Tensor, leg: Leg, group: dist.ProcessGroup) -> list[dist.Work]:
        splits = leg.owned_splits
        self._count((sum(splits) - splits[dist.get_rank(group)]) * outbox.element_size())
        if len(set(splits)) == 1:
            return [dist.reduce_scatter_tensor(home, outbox[: sum(splits)], group=group, async_op=True)]
        parts = list(outbox[: sum(splits)].split(list(splits)))
        return [dist.reduce_scatter(home, parts, group=group, async_op=True)]

    def _count(self, sent: int) -> None:
        self.traffic.calls += 1
        self.traffic.bytes_sent += sent


def _slot(program: Program, index: int, device: torch.device, dtype: torch.dtype) -> Slot:
    """Buffers large enough for every run that will use this slot."""
    runs = program.runs[index :: program.slots]
    home = max(max(run.gathering.home_numel, run.returning.home_numel if run.returning else 0) for run in runs)
    inbox = torch.empty(max(run.gathering.owned_numel for run in runs), device=device, dtype=dtype)
    apart = [run.returning.owned_numel for run in runs if run.returning is not None and not run.mirrored]
    outbox = torch.empty(max(apart), device=device, dtype=dtype) if apart else inbox
    return Slot(torch.empty(home, device=device, dtype=dtype), inbox, outbox)


def _groups(program: Program) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of ranks that the program's buckets meet in, made once."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for run in program.runs:
        ranks = run.bucket.group
        if ranks in groups:
            continue
        groups[ranks] = _world() if len(ranks) == dist.get_world_size() else _subgroup(ranks)
    return groups


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group is there when ranks meet"
    return world


def _subgroup(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A group that only its own ranks take part in making."""
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


def _host_group(plan: Plan, program: Program) -> dist.ProcessGroup | None:
    """A group of all ranks that meet anywhere in the plan, for words between hosts; None if nobody meets."""
    if not program.runs:
        return None
    ranks = sorted({rank for bucket in plan.buckets for rank in bucket.group})
    if dist.get_backend() == "gloo" and len(ranks) == dist.get_world_size():
        return _world()
    return _subgroup(ranks, "gloo")


def _compare_digests(plan: Plan, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
    """Raise ValueError on every rank of a group whose ranks made different plans."""
    mine = plan.digest()
    for ranks, group in groups.items():
        digests: list[str] = [""] * len(ranks)
        dist.all_gather_object(digests, mine, group=group)
        different = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != digests[0]]
        if different:
            raise ValueError(
                f"ranks {different} planned another Muon step than rank {ranks[0]}: build the optimizer on every rank "
                "from the same parameters, in the same order, with the same hyperparameters"
            )
