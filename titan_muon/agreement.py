"""What ranks compare before the first step, the process groups they make, and what they tell each other in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankReport:
    """What a rank says before a step is possible.

    Attributes:
        ranks: global ranks that its parameters rest on.
        groups: ranks of each collective that it takes part in.
        peers: ranks that share matrices with it, directly or through others; empty if it shares none.
        signature: digest of its plan and hyperparameters.
        fault: what is wrong on this rank, or None.
    """

    ranks: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    peers: tuple[int, ...] = ()
    signature: str = ""
    fault: str | None = None


class Agreement:
    """All ranks of the default process group, comparing their reports on the host before anything is exchanged."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._host_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._world: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None

    def open(self, report: RankReport) -> None:
        """Compare reports and make all groups. Raises ValueError on every rank for a fault or a difference on any."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            check_reports([report])
            return
        if self._world is None:
            self._world = _host_group(tuple(range(dist.get_world_size())))
        reports: list[RankReport] = [report] * dist.get_world_size()
        dist.all_gather_object(reports, report, group=self._world)
        check_reports(reports)
        # Every rank makes every group, in one order, members or not. Were a group made by its members alone, torch
        # would name it by a count of groups that differs between ranks, and they would wait for each other forever.
        for ranks in sorted({ranks for each in reports for ranks in each.groups}):
            if ranks not in self._groups:
                self._groups[ranks] = _group(ranks)
        # On backends other than NCCL a group of pieces also carries what hosts tell each other.
        hosts = self._groups if dist.get_backend() != "nccl" else self._host_groups
        for ranks in sorted({each.peers for each in reports if each.peers}):
            if ranks not in hosts:
                hosts[ranks] = _host_group(ranks)
        self._peers = hosts[report.peers] if report.peers else None

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of these global ranks, one of those in the reports."""
        return self._groups[ranks]

    def max_over_ranks(self, codes: Sequence[int]) -> list[int]:
        """The largest of each code, 0 to 255, over the ranks that share matrices."""
        tensor = torch.tensor(codes, dtype=torch.uint8)
        if self._peers is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._peers)
        return [int(code) for code in tensor.tolist()]


def check_reports(reports: Sequence[RankReport]) -> None:
    """Raise ValueError for the first fault, or for ranks of the same parameters that plan different steps."""
    for rank, report in enumerate(reports):
        if report.fault is not None:
            raise ValueError(f"{report.fault} (on rank {rank})" if len(reports) > 1 else report.fault)
    # Only ranks that hold the same parameters must agree: towers on disjoint meshes have plans of their own.
    for rank, report in enumerate(reports):
        others = [peer for peer in report.ranks if peer < len(reports) and reports[peer].signature != report.signature]
        if others:
            raise ValueError(
                f"ranks {others} planned another Muon step than rank {rank}: build the optimizer on every rank from "
                "the same parameters, in the same order, with the same hyperparameters"
            )


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group exists while reports are compared"
    return world if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def _host_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    # NCCL would copy to the device, and the host would wait for all that is queued there.
    return _group(ranks) if dist.get_backend() != "nccl" else dist.new_group(list(ranks), backend="gloo")
