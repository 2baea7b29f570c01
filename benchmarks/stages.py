"""Kernel launches of a step by stage, on fake CUDA tensors, as a table of Markdown.

    python -m benchmarks.stages                                     # all rows: a minute; no CUDA build and no GPU
    python -m benchmarks.stages --worlds qwen3_8b --fused false

Ranks are those of docs/results/h200.md. "skippable" is the sum of a step that the device may skip. The rules for lists
are those of `benchmarks/rehearsal/launches.py`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal
from unittest import mock

import torch
import tyro
from torch import nn

import titan_muon.engine.engine as engine_module
import titan_muon.engine.step.step as step_module
from benchmarks.contenders import MODELS
from benchmarks.one_gpu import one_rank
from benchmarks.one_gpu.worlds import read
from benchmarks.rehearsal.fake_gpu import fake_gpu
from benchmarks.rehearsal.launches import Launches
from titan_muon import Expert, Muon
from titan_muon.plugins.clip import NormCheck

STAGES = ("advance", "gather", "orthogonalize", "send_back", "apply", "tell", "rest")
ONE_GPU = {"one GPU, reference": "reference", "one GPU, auto": "auto"}
WORLDS = ("qwen3_8b", "qwen3_30b_a3b", "kimi_k2", *ONE_GPU)


class ByStage(Launches):
    """Counts launches in `stages` too. Collectives and the fill of what they receive are no launches of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Counter[str] = Counter()
        self._stage = "rest"

    @contextlib.contextmanager
    def staged(self, stage: str, bucket: int | None = None) -> Iterator[None]:
        """In the place of `trace_range`."""
        before, self._stage = self._stage, stage
        try:
            yield
        finally:
            self._stage = before

    def weight(self, name: str, args: Any) -> int:
        count = super().weight(name, args)
        self.stages[self._stage] += count
        return count

    def launched(self, kernel: str) -> None:
        super().launched(kernel)
        self.stages[self._stage] += 1


@contextlib.contextmanager
def muon_of(name: str, fused: bool | Literal["auto"]) -> Iterator[Muon]:
    """The Muon of a row on fake CUDA tensors with gradients."""
    with mock.patch("torch.backends.cuda.is_built", return_value=True), fake_gpu():
        if name in ONE_GPU:
            params = []
            for layer, (kind, shape) in product(range(MODELS["gpu"].layers), MODELS["gpu"].shapes.items()):
                params.append((f"layers.{layer}.{kind}", nn.Parameter(torch.empty(shape, device="cuda"))))
                params[-1][1].grad = torch.empty(shape, device="cuda")
            expert = Expert(orthogonalize=ONE_GPU[name], fused=fused)  # type: ignore[arg-type]
            yield Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw", expert=expert)
        else:
            world = read(name)
            with one_rank.fake_world(world):
                groups, split = one_rank.groups_of(world, "muon", torch.device("cuda")), one_rank.splits_of(world)
                yield one_rank.OneRankMuon(groups, split=split, expert=Expert(fused=fused, keep_buffers=True))


def counted(name: str, fused: bool | Literal["auto"]) -> tuple[Counter[str], int]:
    """Launches of the third step by stage, and those of a fourth that the device may skip."""
    with muon_of(name, fused) as muon:
        muon.step()
        muon.step()
        steps = []
        for skippable in (False, True):
            if skippable:
                muon.skip_unless_finite(NormCheck(torch.ones((), device="cuda"), (), torch.zeros(0)))
            counter = ByStage()
            patches = [
                mock.patch.object(module, "trace_range", counter.staged) for module in (step_module, engine_module)
            ]
            with counter, patches[0], patches[1]:
                muon.step()
            steps.append(counter.stages)
    return steps[0], steps[1].total()


@dataclass(frozen=True)
class Arguments:
    """Count launches by stage."""

    worlds: tuple[str, ...] = WORLDS
    """Rows."""
    fused: Literal["auto", "true", "false"] = "auto"
    """`muon.expert.fused`."""


def line(cells: Sequence[object]) -> str:
    """A line of the table."""
    return f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in cells)} |"


def main(arguments: Arguments) -> None:
    """Print the table, row by row."""
    torch.set_num_threads(1)
    print(f"{line(['row', *STAGES, 'sum', 'skippable'])}\n|---|{'---:|' * (len(STAGES) + 2)}", flush=True)
    for name in arguments.worlds:
        stages, skippable = counted(name, {"true": True, "false": False}.get(arguments.fused, "auto"))
        print(line([name, *(stages[stage] for stage in STAGES), stages.total(), skippable]), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
