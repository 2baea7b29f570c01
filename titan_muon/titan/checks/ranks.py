"""Compares ranks in a reported step: their text, step counters, clipping and leftover gradients."""

from collections.abc import Mapping, Sequence
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
    crc: int  # CRC-32 of all inputs, positions and labels
    max_norm: int  # CRC-32 of the limit of clipping
    wrong_tokens: int  # positions and labels that do not follow the inputs
    lost_steps: int  # of the step counter beyond the training loop's steps, since the last report
    extra_steps: int  # an optimizer's steps beyond the training loop's, since the last report
    fallen_counters: int  # AdamW's step counters below those of the last report
    stale_gradients: int  # parameters with a gradient before the first backward
    sound_until: int  # last step before training began to look wrong


RESUME = "continue from a checkpoint with checkpoint.load."
NOT_ZERO: Mapping[str, str] = {
    "wrong_tokens": "{ranks} trained on positions or labels that do not follow the inputs ({counts}); " + RESUME,
    "lost_steps": "the step counter moved without training since the last report ({counts}), and the schedule did not; "
    + RESUME,
    "extra_steps": "an optimizer took another number of steps than training since the last report ({counts}). Call "
    "step() once in each training step; " + RESUME,
    "fallen_counters": "step counters of AdamW went back on {ranks}, so that its next updates are wrong; " + RESUME,
    "stale_gradients": "gradients of the step before were not cleared on {ranks}, and were added to this step's. Call "
    "zero_grad() in each training step; " + RESUME,
}
"""Errors for fields of a report that must be 0."""


def gather(report: RankReport, group: dist.ProcessGroup | None) -> list[RankReport]:
    """Reports in rank order. Collective over `group` (gloo; None: a single process)."""
    if group is None:
        return [report]
    mine = torch.tensor(astuple(report), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [RankReport(*row.tolist()) for row in rows]


def check_reports(step: int, reports: Sequence[RankReport]) -> None:
    """Raise RunFault for ranks with wrong text, other clipping, or a field of NOT_ZERO."""
    if wrong := [(rank, r) for rank, r in enumerate(reports) if r.position != r.expected]:
        shown = ", ".join(f"rank {rank} read block {r.position} instead of {r.expected}" for rank, r in wrong[:4])
        raise RunFault(f"step {step}: {shown}. Some training text was skipped or repeated; {RESUME}")
    if pair := differing_pair(reports, same="data_rank", field="crc"):
        raise RunFault(
            f"step {step}: ranks {pair[0]} and {pair[1]} train on the same sequences and read different text, because "
            "data.files or data.cache differ between them. Give all ranks the same files."
        )
    if others := [rank for rank, r in enumerate(reports) if r.max_norm != reports[0].max_norm]:
        raise RunFault(f"step {step}: training.max_norm on ranks {others[:4]} is not that of rank 0; {RESUME}")
    for field, text in NOT_ZERO.items():
        if bad := {rank: count for rank, r in enumerate(reports) if (count := getattr(r, field))}:
            counts = ", ".join(f"{count:+} on rank {rank}" for rank, count in [*bad.items()][:4])
            raise RunFault(f"step {step}: {text.format(counts=counts, ranks=f'ranks {[*bad][:4]}')}")


def differing_pair(reports: Sequence[RankReport], *, same: str, field: str) -> tuple[int, int] | None:
    """Two ranks with an equal field `same` and another value of `field`, or None."""
    first: dict[int, int] = {}
    for rank, report in enumerate(reports):
        peer = first.setdefault(getattr(report, same), rank)
        if getattr(reports[peer], field) != getattr(report, field):
            return peer, rank
    return None
