"""Compares ranks in a reported step: their text, optimizer steps and leftover gradients."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from titan_muon.titan.fault import RunFault

UNKNOWN = -1


@dataclass(frozen=True)
class RankReport:
    """A rank's part in a reported step; UNKNOWN for no number."""

    data_rank: int  # place among data-parallel ranks; ranks with equal places must read equal text
    position: int  # number of the step's first block
    expected: int  # the right number
    crc: int  # CRC-32 of all inputs
    extra_steps: int  # an optimizer's steps beyond the training loop's, since the last report
    stale_gradients: int  # parameters with a gradient before the first backward
    sound_until: int  # last step before training began to look wrong


def gather(report: RankReport, group: dist.ProcessGroup | None) -> list[RankReport]:
    """Reports in rank order. Collective over `group` (gloo; None: a single process)."""
    if group is None:
        return [report]
    mine = torch.tensor(astuple(report), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [RankReport(*(int(number) for number in row)) for row in rows]


def check_reports(step: int, reports: Sequence[RankReport]) -> None:
    """Raise RunFault for ranks with wrong text, a wrong number of optimizer steps, or leftover gradients."""
    if wrong := [(rank, r) for rank, r in enumerate(reports) if r.position != r.expected]:
        shown = ", ".join(f"rank {rank} read block {r.position} instead of {r.expected}" for rank, r in wrong[:4])
        raise RunFault(
            f"step {step}: {shown}. Some training text was skipped or repeated; continue from a checkpoint with "
            "checkpoint.load."
        )
    first: dict[int, int] = {}
    for rank, report in enumerate(reports):
        peer = first.setdefault(report.data_rank, rank)
        if reports[peer].crc != report.crc:
            raise RunFault(
                f"step {step}: ranks {peer} and {rank} train on the same sequences and read different text, because "
                "data.files or data.cache differ between them. Give all ranks the same files."
            )
    if wrong := [(rank, r) for rank, r in enumerate(reports) if r.extra_steps]:
        shown = ", ".join(f"{r.extra_steps:+} on rank {rank}" for rank, r in wrong[:4])
        raise RunFault(
            f"step {step}: an optimizer took another number of steps than training since the last report ({shown}). "
            "Call step() once in each training step; continue from a checkpoint with checkpoint.load."
        )
    if stale := [rank for rank, r in enumerate(reports) if r.stale_gradients]:
        raise RunFault(
            f"step {step}: gradients of the step before were not cleared on ranks {stale[:4]}, and were added to this "
            "step's. Call zero_grad() in each training step; continue from a checkpoint with checkpoint.load."
        )


def twins(reports: Sequence[RankReport]) -> tuple[int, int] | None:
    """Two ranks with equal inputs and different data-parallel places, or None."""
    first: dict[int, tuple[int, int]] = {}
    for rank, report in enumerate(reports):
        peer, place = first.setdefault(report.crc, (rank, report.data_rank))
        if place != report.data_rank:
            return peer, rank
    return None
