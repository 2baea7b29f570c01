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

from .plan.layout import Span, spans
from .plan.program import BucketProgram, Leg, Parcel, Program

# PyTorch 2.13 renamed these; the old names, all that 2.11 has, warn from then on.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Parked:
    """A piece of a matrix, its (rows, columns) view in a buffer, and its rectangles."""

    matrix: int
    view: Tensor
    spans: tuple[Span, ...]


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

    def leaving(self, run: BucketProgram) -> Tensor:
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

    def __init__(self, run: BucketProgram, rank: int, slot: Slot) -> None:
        gathering, returning = run.gathering, run.returning
        self.matrices = run.matrices
        self.stored = _parked(run.stored, slot.home)
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
        Parked(p.matrix, buffer[p.offset : p.offset + p.piece.numel].view(p.piece.shape), spans(p.piece))
        for p in parcels
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
        if input.is_cuda:
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
        council: has the process groups.
    """

    def __init__(
        self, program: Program, device: torch.device, dtype: torch.dtype, collectives: Collectives, council: Council
    ) -> None:
        self._groups = tuple(council.group(run.bucket.group) for run in program.buckets)
        self._collectives = collectives
        self._pending: dict[int, list[dist.Work]] = {}
        self._runs = program.buckets
        self._slots = make_slots(program, device, dtype)
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


def make_slots(program: Program, device: torch.device, dtype: torch.dtype) -> tuple[Slot, ...]:
    """The buffers of each run; runs of other rounds may have the same ones."""
    sharing: dict[tuple[int, int], list[BucketProgram]] = {}
    for index, run in enumerate(program.buckets):
        sharing.setdefault(program.slot(index), []).append(run)
    made = {place: _slot(runs, device, dtype) for place, runs in sharing.items()}
    return tuple(made[program.slot(index)] for index in range(len(program.buckets)))


def _slot(runs: Sequence[BucketProgram], device: torch.device, dtype: torch.dtype) -> Slot:
    """Buffers large enough for each of these runs."""
    home = max(max(run.gathering.home_numel, run.returning.home_numel if run.returning else 0) for run in runs)
    inbox = torch.empty(max(run.gathering.owned_numel for run in runs), device=device, dtype=dtype)
    apart = [run.returning.owned_numel for run in runs if run.returning is not None and not run.mirrored]
    outbox = torch.empty(max(apart), device=device, dtype=dtype) if apart else inbox
    return Slot(torch.empty(home, device=device, dtype=dtype), inbox, outbox)


@dataclass(frozen=True)
class Word:
    """What a rank says before a step is possible.

    Attributes:
        ranks: global ranks that its parameters rest on.
        groups: ranks that it will meet, in groups.
        peers: ranks that share matrices, by others too, and must do the same in every step; empty if it shares none.
        signature: of its plan and hyperparameters.
        fault: what is wrong on this rank, or None.
    """

    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    signature: str
    fault: str | None


class Council:
    """All ranks of the default process group, agreeing on their hosts before anything is exchanged.

    Every rank of the default group builds its Muon at the same point of the program, as it would its process groups: a
    group is made by all of them, members or not, since only that is in step on ranks that are members of different
    numbers of groups. Groups are made once for each set of ranks.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._known_hosts: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._hosts: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None

    def open(self, word: Word) -> None:
        """Compare words and make all groups. Raises ValueError on every rank for a fault or a difference on any."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            check_words([word])
            return
        if self._hosts is None:
            self._hosts = _host_group(None)
        words: list[Word] = [word] * dist.get_world_size()
        dist.all_gather_object(words, word, group=self._hosts)
        check_words(words)
        for ranks in sorted({ranks for said in words for ranks in said.groups}):
            if ranks not in self._known:
                self._known[ranks] = _group(ranks)
        self._peers = self._host_groups({said.peers for said in words if said.peers}, word)

    def _host_groups(self, all_ranks: set[tuple[int, ...]], mine: Word) -> dist.ProcessGroup | None:
        """The group of this rank's peers, for words between hosts, if it has any."""
        known = self._known if dist.get_backend() != "nccl" else self._known_hosts
        for ranks in sorted(all_ranks):
            if ranks not in known:
                known[ranks] = _host_group(ranks)
        return known[mine.peers] if mine.peers else None

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of these ranks, one of those that were said to meet."""
        return self._known[ranks]

    def worst(self, codes: Sequence[int]) -> list[int]:
        """The largest of each code, 0 to 255, over the ranks that share matrices."""
        tensor = torch.tensor(codes, dtype=torch.uint8)
        if self._peers is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._peers)
        return [int(code) for code in tensor.tolist()]


def check_words(words: Sequence[Word]) -> None:
    """Raise ValueError for the first fault, or for ranks of the same parameters that plan different steps."""
    for rank, word in enumerate(words):
        if word.fault is not None:
            raise ValueError(f"{word.fault} (on rank {rank})" if len(words) > 1 else word.fault)
    for rank, word in enumerate(words):
        others = [peer for peer in word.ranks if peer < len(words) and words[peer].signature != word.signature]
        if others:
            raise ValueError(
                f"ranks {others} planned another Muon step than rank {rank}: build the optimizer on every rank from "
                "the same parameters, in the same order, with the same hyperparameters"
            )


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group is there when ranks meet"
    return world if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def _host_group(ranks: tuple[int, ...] | None) -> dist.ProcessGroup:
    """A group that does not wait for a device; NCCL's would."""
    if dist.get_backend() != "nccl":
        return _group(tuple(range(dist.get_world_size())) if ranks is None else ranks)
    return dist.new_group(None if ranks is None else list(ranks), backend="gloo")
