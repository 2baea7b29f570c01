"""Compares the text of ranks in a reported step."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from titan_muon.trainer.fault import RunFault

UNKNOWN = -1


@dataclass(frozen=True)
class RankReport:
    """A rank's part in a reported step; UNKNOWN for no number."""

    data_rank: int  # place among data-parallel ranks; ranks with equal places must read equal text
    position: int  # number of the step's first block
    expected: int  # the right number
    crc: int  # CRC-32 of all inputs, positions and labels
    wrong_tokens: int  # positions and labels that do not follow the inputs


RESUME = "continue from a checkpoint with checkpoint.load."


def gather(report: RankReport, group: dist.ProcessGroup | None) -> list[RankReport]:
    """Reports in rank order. Collective over `group` (gloo; None: a single process)."""
    if group is None:
        return [report]
    mine = torch.tensor(astuple(report), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [RankReport(*row.tolist()) for row in rows]


def check_reports(step: int, reports: Sequence[RankReport]) -> None:
    """Raise RunFault for ranks with wrong text."""
    if wrong := [(rank, r) for rank, r in enumerate(reports) if r.position != r.expected]:
        shown = ", ".join(f"rank {rank} read block {r.position} instead of {r.expected}" for rank, r in wrong[:4])
        raise RunFault(f"step {step}: {shown}. Some training text was skipped or repeated; {RESUME}")
    if pair := differing_pair(reports, same="data_rank", field="crc"):
        raise RunFault(
            f"step {step}: ranks {pair[0]} and {pair[1]} train on the same sequences and read different text, because "
            "data.files or data.cache differ between them. Give all ranks the same files."
        )
    if bad := {rank: r.wrong_tokens for rank, r in enumerate(reports) if r.wrong_tokens}:
        counts = ", ".join(f"{count:+} on rank {rank}" for rank, count in [*bad.items()][:4])
        wrong_tokens = f"trained on positions or labels that do not follow the inputs ({counts})"
        raise RunFault(f"step {step}: ranks {[*bad][:4]} {wrong_tokens}; {RESUME}")


def differing_pair(reports: Sequence[RankReport], *, same: str, field: str) -> tuple[int, int] | None:
    """Two ranks with an equal field `same` and another value of `field`, or None."""
    first: dict[int, int] = {}
    for rank, report in enumerate(reports):
        peer = first.setdefault(getattr(report, same), rank)
        if getattr(reports[peer], field) != getattr(report, field):
            return peer, rank
    return None
