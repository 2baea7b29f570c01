"""Report on what a recipe adds to a plan: pipeline stages, the dtype of weights, and tensor parallelism of owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch

from titan_muon.assignment.rules import Assignment


def weight_lines(assigned: Sequence[Assignment], dtypes: Iterable[torch.dtype], rounding: str) -> Iterable[str]:
    """Effect of rounding on bfloat16 weights without a float32 copy, by optimizer."""
    if torch.bfloat16 not in dtypes:
        return
    yield 'weights: bfloat16, and no float32 copy of them; training.dtype = "float32" would keep one'
    lost = "rounds to the nearest, and loses updates of less than 0.2 % of a weight"
    for optimizer in sorted({a.optimizer for a in assigned}):
        stochastic = optimizer == "muon" and rounding == "stochastic"
        yield f"  {optimizer} {'rounds stochastically, and keeps small updates on average' if stochastic else lost}"


def stage_ranks(world_size: int, stages: int, stage: int) -> range:
    """Ranks of pipeline stage `stage` of `stages`."""
    size = world_size // stages
    return range(stage * size, (stage + 1) * size)


def pipeline_line(ranks: range, world_size: int, assigned: Sequence[Assignment]) -> str:
    """Heading for a pipeline rank."""
    stage, elements = ranks.start // len(ranks), sum(prod(a.shape) for a in assigned)
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"pipeline rank {stage} of {world_size // len(ranks)}, {where}: {elements:,} parameters"
