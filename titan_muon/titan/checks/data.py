"""Each data-parallel rank must train on its own sequences, and on the next ones: compared at every report."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_muon.titan.fault import RunFault

UNKNOWN = -1
"""Position of a loader that counts no blocks."""


@dataclass(frozen=True)
class ReadBatch:
    """What a rank read for a step.

    Attributes:
        data_rank: the rank's place among data-parallel ranks. Ranks with equal places must read equal data.
        position: number of the step's first block in the stream, or UNKNOWN.
        expected: where the rank should have read, or UNKNOWN.
        crc: CRC-32 of all inputs of the step.
    """

    data_rank: int
    position: int
    expected: int
    crc: int


class StepInputs:
    """CRC-32 of the inputs that this rank reads in a step, over all of the step's batches."""

    def __init__(self) -> None:
        self.crc = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Add a batch of token ids, an int64 tensor on the CPU."""
        self.crc = zlib.crc32(inputs.numpy().tobytes(), self.crc)

    def take(self) -> int:
        """The CRC-32 of all batches since the last call."""
        crc, self.crc = self.crc, 0
        return crc


def gather(batch: ReadBatch, group: dist.ProcessGroup | None) -> list[ReadBatch]:
    """What every rank read, in rank order; all ranks of `group` (on the CPU; None: one process) call this together."""
    if group is None:
        return [batch]
    mine = torch.tensor([batch.data_rank, batch.position, batch.expected, batch.crc], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [ReadBatch(*(int(number) for number in row)) for row in rows]


def check_positions(step: int, batches: Sequence[ReadBatch]) -> None:
    """Raise RunFault for a rank that read other blocks than the step's, or than its tensor-parallel peers."""
    wrong = [(rank, b) for rank, b in enumerate(batches) if b.position != b.expected]
    if wrong:
        shown = ", ".join(f"rank {r} read block {b.position} instead of {b.expected}" for r, b in wrong[:4])
        raise RunFault(
            f"step {step}: {shown}. Some training text was skipped or repeated; continue from the checkpoint before "
            "with checkpoint.load."
        )
    first: dict[int, int] = {}
    for rank, batch in enumerate(batches):
        peer = first.setdefault(batch.data_rank, rank)
        if batches[peer].crc != batch.crc:
            raise RunFault(
                f"step {step}: ranks {peer} and {rank} share each sequence and read different text; their data.files "
                "or data.cache differ. Give all ranks the same files."
            )


def twins(batches: Sequence[ReadBatch]) -> tuple[int, int] | None:
    """The first two ranks of different data-parallel places that read equal inputs; None without any."""
    first: dict[int, tuple[int, int]] = {}
    for rank, batch in enumerate(batches):
        peer, place = first.setdefault(batch.crc, (rank, batch.data_rank))
        if place != batch.data_rank:
            return peer, rank
    return None
