"""What ranks compare before the first step, the process groups they make, and what they tell each other in a step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class PlanReport:
    """What ranks compare before a step is possible: equal on all ranks that made the same plan.

    Attributes:
        ranks: global ranks that the plan's parameters rest on; empty on a rank that trains none.
        buckets: ranks of each collective, of whole buckets and among the owners of a matrix's slices.
        groups: those of all sets of ranks here for which a process group has to be made.
        apart: ranks of each collective that goes over a process group which nothing else uses, made in any case.
        sharing: ranks that must do the same in every step, as disjoint sets.
        parts: digests of the plan and of its causes, by name, so that a difference is named.
    """

    ranks: Ranks = ()
    buckets: tuple[Ranks, ...] = ()
    groups: tuple[Ranks, ...] = ()
    apart: tuple[Ranks, ...] = ()
    sharing: tuple[Ranks, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def digest(self) -> bytes:
        """SHA-256 of the report."""
        return _digest(self)


class Agreement:
    """All ranks of the default process group, comparing plans before anything is exchanged.

    Every rank of the world takes part, whether it trains matrices or not: process groups are made by all ranks, and a
    pipeline stage with the embedding alone would otherwise leave the others waiting.

    Attributes:
        rank: this rank of the default process group; 0 without one.
        peers: process group of the ranks that must do the same in every step as this one, or None if there are none.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._known: dict[Ranks, dist.ProcessGroup] = {}
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        self._apart: dict[Ranks, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self.peers: dist.ProcessGroup | None = None

    def open(self, report: PlanReport, known: Mapping[Ranks, dist.ProcessGroup], device: torch.device) -> None:
        """Compare reports, make all process groups and use each once.

        `known` are the process groups of this rank's meshes, which no report asks to make. Raises ValueError on every
        rank for plans that differ.
        """
        digests, reports = self._exchanged(report)
        check_reports(digests, reports)
        if self._size == 1:
            return
        # Meshes differ between ranks, and between plans. A group of a mesh never stands for one that all ranks make.
        self._known = dict(known)
        for ranks in sorted({ranks for each in reports.values() for ranks in each.groups}):
            if ranks not in self._groups:
                self._groups[ranks] = self._made_group(ranks, device)
        for ranks in sorted({ranks for each in reports.values() for ranks in each.apart}):
            if ranks not in self._apart:
                self._apart[ranks] = self._made_group(ranks, device)
        mine = next((ranks for ranks in report.sharing if self.rank in ranks), None)
        self.peers = None if mine is None else self.group(mine)
        self._warm_up([self.group(ranks) for ranks in report.buckets if self.rank in ranks], device)
        self._warm_up([self.group_apart(ranks) for ranks in report.apart if self.rank in ranks], device)
        if self.peers is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=self.peers)

    def same_everywhere(self, values: Mapping[str, Hashable]) -> frozenset[str]:
        """The keys that every rank of the world has, with one value. All ranks call it together."""
        _, others = self._exchanged(dict(sorted(values.items())))
        return frozenset(
            key for key, value in values.items() if all(key in each and each[key] == value for each in others.values())
        )

    def _exchanged(self, report: T) -> tuple[list[bytes], dict[bytes, T]]:
        """The digest of what every rank reports, by its text, and one report for each digest."""
        digest = _digest(report)
        if self._size == 1:
            return [digest], {digest: report}
        # Digests, not reports: those of 1,024 ranks would be megabytes on each of them. Ranks that planned the same
        # have equal reports, so the lowest of them speaks for all; there are as many as pipeline stages.
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_device())
        # The fake process group of dry runs fills no outputs: there every rank is like this one.
        every = [mine.clone() for _ in range(self._size)]
        dist.all_gather(every, mine)
        digests = [bytes(each.tolist()) for each in every]
        first = {each: rank for rank, each in reversed(list(enumerate(digests)))}
        reports = {digest: report}
        for each, rank in sorted(first.items(), key=lambda item: item[1]) if len(first) > 1 else ():
            said = [report if rank == self.rank else None]
            dist.broadcast_object_list(said, src=rank, device=_device())
            assert said[0] is not None, f"rank {rank} reported nothing"
            reports[each] = said[0]
        return digests, reports

    def together(self, made: Callable[[], T]) -> T:
        """The result of `made` on this rank.

        Raises:
            ValueError: on every rank of the world, if `made` raises a ValueError on any.
            RuntimeError: on every other rank, if `made` raises another error on a rank. The rank with the error, such
                as an OutOfMemoryError, raises the error itself.
        """
        results: list[T] = []
        fault: Exception | None = None
        try:
            results.append(made())
        except Exception as error:
            fault = error
        self._raise_together(fault)
        return results[0]

    def _raise_together(self, fault: Exception | None) -> None:
        """Raise an error on every rank of the world if there is a fault on any: the fault of the lowest rank."""
        # A rank that raised by itself would leave the others waiting for it in the next collective.
        if self._size == 1:
            if fault is not None:
                raise fault
            return
        lowest = torch.tensor([self._size if fault is None else self.rank], device=_device())
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        rank = int(lowest.item())
        if rank == self._size:
            return
        refused = isinstance(fault, ValueError)
        message = [None if fault is None else (refused, str(fault) if refused else f"{type(fault).__name__}: {fault}")]
        dist.broadcast_object_list(message, src=rank, device=_device())
        if fault is not None and not refused:
            raise fault
        assert message[0] is not None, f"rank {rank} has a fault, and sent no message"
        is_refusal, text = message[0]
        raise (ValueError if is_refusal else RuntimeError)(f"{text} (on rank {rank})") from fault

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank of the world."""
        if self._size == 1:
            return value
        found = torch.tensor([int(value)], device=_device())
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The process group of these global ranks, one of those in the reports or of a mesh axis."""
        if len(ranks) == self._size:
            return _world()
        return self._known[ranks] if ranks in self._known else self._groups[ranks]

    def group_apart(self, ranks: Ranks) -> dist.ProcessGroup:
        """The process group of these global ranks that nothing but buckets uses."""
        return self._apart[ranks]

    def max_over_ranks(self, codes: Sequence[int]) -> list[int]:
        """The largest of each code over the peers. The host waits for all of them, and for the device."""
        if self.peers is None:
            return list(codes)
        tensor = torch.tensor(codes, dtype=torch.int32, device=_device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.peers)
        return [int(code) for code in tensor.tolist()]

    def start_max_over_peers(self, tensor: Tensor) -> dist.Work | None:
        """Begin to put the largest of each element over the peers into a tensor; None if there is no peer."""
        return None if self.peers is None else start_max(tensor, self.peers)

    def set_timeout(self, timeout: timedelta) -> None:
        """Have collectives of the groups made here fail after `timeout`; those of meshes are their owner's."""
        # torch 2.14 has the public name.
        setter = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
        for group in self._made:
            setter(timeout, group)

    def close(self) -> None:
        """Destroy the groups made here, on all ranks at the same point of the program."""
        for group in self._made if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        self._made.clear()

    def _made_group(self, ranks: Ranks, device: torch.device) -> dist.ProcessGroup:
        # Every rank makes every group, in one order, members or not. Were a group made by its members alone, torch
        # would name it by a count of groups that differs between ranks, and they would wait for each other forever.
        group = dist.new_group(list(ranks), timeout=world_timeout(device.type))
        if self.rank in ranks:
            self._made.append(group)
        return group

    def _warm_up(self, used: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Open the connections of the groups that this rank uses, in one order on all of their members."""
        # NCCL opens them in the first collective. There they cost seconds of the first step, and a network that cannot
        # open them would be found after the first forward and backward, by a time-out.
        for group in used:
            sent = torch.zeros(dist.get_world_size(group), device=device)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _digest(report: object) -> bytes:
    """SHA-256 of the text of a report."""
    return hashlib.sha256(repr(report).encode()).digest()


def digest_of(part: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a part's text."""
    return _digest(part).hex()[:16]


def check_reports(digests: Sequence[bytes], reports: Mapping[bytes, PlanReport]) -> None:
    """Raise ValueError if ranks of the same parameters planned different steps, or if no rank has any parameter."""
    # Only ranks that hold the same parameters must agree: pipeline stages and towers on disjoint meshes plan apart.
    for digest in dict.fromkeys(digests):
        others = [peer for peer in reports[digest].ranks if peer < len(digests) and digests[peer] != digest]
        empty = [peer for peer in others if not reports[digests[peer]].ranks]
        if empty:
            raise ValueError(
                f"Muon has no parameter to train on ranks {empty}, which hold parameters that rank "
                f"{digests.index(digest)} trains: it was given none there, or all of them are frozen"
            )
        if others:
            raise ValueError(
                f"ranks {others} planned another Muon step than rank {digests.index(digest)}: "
                f"{_difference(reports[digest], reports[digests[others[0]]])}"
            )
    if not any(report.ranks for report in reports.values()):
        raise ValueError("Muon has no parameter to train: it was given none, or all of them are frozen")


CAUSES: Mapping[str, str] = {
    "parameters": "their parameters differ, in names, order, shapes or layouts; build the optimizer on every rank from "
    "the same parameters, in the same order; a parameter that only some ranks have must be a DTensor on their mesh",
    "hyperparameters": "their parameter groups have different hyperparameters; set the same values on every rank",
    "options": "their options differ; give every rank the same options",
    "plan": "parameters, hyperparameters and options are equal, and the planned costs differ; give every rank the same "
    "machine.file, the same kernels (ns_kernel) and the same versions of titan_muon and PyTorch",
}
"""What to tell the user, by the first part of two reports that differs."""


def _difference(report: PlanReport, other: PlanReport) -> str:
    parts = dict(other.parts)
    different = next((name for name, digest in report.parts if parts.get(name) != digest), "plan")
    return CAUSES[different]


def world_timeout(device: str = "cpu") -> timedelta | None:
    """The time-out of the default process group, which a new group does not take over by itself.

    With one backend for each type of device, the time-out of `device` counts.
    """
    for kind in dict.fromkeys((device, "cpu", "cuda")):
        try:
            options = _world()._get_backend(torch.device(kind)).options
        except (AttributeError, RuntimeError):
            # A backend without options (the fake one), or none for this type of device.
            continue
        timeout = getattr(options, "_timeout", None)
        return timeout if isinstance(timeout, timedelta) else None
    return None


def start_max(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to put the largest of each element over a group's ranks, by default all, into a tensor; None if alone."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group exists while ranks meet"
    return world


def _device() -> torch.device:
    """Where tensors are that the default process group carries."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
