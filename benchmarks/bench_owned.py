"""Training with owned matrices and with FSDP2 alone: memory, traffic and time of the passes and of Muon's step.

Each process has one thread on the CPU over gloo, or a GPU over NCCL with `--device cuda`. Both models are the same
transformer. Timed steps take turns, so that other load on the machine affects both equally.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.distributed.fsdp import MixedPrecisionPolicy

# A script finds only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import spread
from benchmarks.bench_step import barrier, check_device, finish, start
from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.memory_use import allocated
from benchmarks.owned_model import Net, Setup, data_mesh, loss_of, make, place
from titan_muon import Muon

PLACEMENTS = ("owned", "sharded")
PEAKS = 5
"""Number of passes with measured memory; gloo's threads free their copies at varying times."""
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Figures:
    """Figures of a placement over all ranks.

    Attributes:
        stored: bytes of parameters on the fullest rank.
        peak: largest bytes that forward and backward allocate on a rank, over several passes.
        forward: bytes sent over all ranks.
        backward: bytes sent over all ranks.
        step: bytes sent over all ranks in Muon's step.
        calls: collectives of the busiest rank in forward and backward.
        step_calls: collectives of the busiest rank in Muon's step.
        passes_ms: median time of forward and backward.
        passes_spread, step_spread: of the same times.
        step_ms: median time of Muon's step.
    """

    name: str
    stored: int
    peak: int
    forward: int
    backward: int
    step: int
    calls: int
    step_calls: int
    passes_ms: float
    passes_spread: float
    step_ms: float
    step_spread: float


class Trainee:
    """A model and its Muon under a placement, after two steps."""

    def __init__(
        self, name: str, rank: int, nproc: int, sizes: dict[str, int], reshard: bool, device: torch.device
    ) -> None:
        self.rank, self.nproc, self.device = rank, nproc, device
        setup = Setup(name, reshard=reshard, policy=POLICY)
        self.model: Net = make(**sizes).to(device)
        place(self.model, setup, data_mesh(nproc, setup, self.model, device.type))
        named = [(n, p) for n, p in self.model.named_parameters() if "layers" in n and p.ndim == 2]
        self.optimizer = Muon(named, lr=1e-3)
        self.stored = sum(p.to_local().nbytes for p in self.model.parameters())  # type: ignore[attr-defined]
        self.passes(0)
        self.optimizer.step()

    def forward(self, step: int) -> torch.Tensor:
        return loss_of(self.model, self.rank, self.nproc, step)

    def passes(self, step: int) -> None:
        """Forward and backward from cleared gradients."""
        self.model.zero_grad(set_to_none=True)
        self.forward(step).backward()

    def counts(self) -> list[int]:
        """Peak, bytes sent in forward, backward and step, and calls of the passes and of the step."""
        peak = 0
        for step in range(PEAKS):
            self.model.zero_grad(set_to_none=True)
            peak = max(peak, allocated(lambda step=step: self.passes(step), self.device)[1])  # type: ignore[misc]
        self.model.zero_grad(set_to_none=True)
        with CollectiveCounter() as forward:
            loss = self.forward(2)
        with CollectiveCounter() as backward:
            loss.backward()
        with CollectiveCounter() as step:
            self.optimizer.step()
        calls = len(forward.calls) + len(backward.calls)
        return [self.stored, peak, forward.sent, backward.sent, step.sent, calls, len(step.calls)]

    def times(self, step: int) -> tuple[float, float]:
        return seconds(lambda: self.passes(step), self.device), seconds(self.optimizer.step, self.device)


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """Time of the slowest rank."""
    barrier(device)
    begin = time.perf_counter()
    act()
    finish(device)
    elapsed = torch.tensor(time.perf_counter() - begin, device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def run(
    rank: int, nproc: int, sizes: dict[str, int], repeats: int, reshard: bool, device: torch.device
) -> list[Figures]:
    """Figures of both placements, equal on every rank."""
    trainees = {name: Trainee(name, rank, nproc, sizes, reshard, device) for name in PLACEMENTS}
    counted: dict[str, list[list[int]]] = {}
    for name, trainee in trainees.items():
        ranks: list[Any] = [None] * nproc
        dist.all_gather_object(ranks, trainee.counts())
        counted[name] = ranks
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in PLACEMENTS}
    for repeat in range(repeats):
        for name in PLACEMENTS if repeat % 2 else reversed(PLACEMENTS):
            timed[name].append(trainees[name].times(repeat))
    return [figures(name, counted[name], timed[name]) for name in PLACEMENTS]


def figures(name: str, ranks: Sequence[Sequence[int]], times: Sequence[tuple[float, float]]) -> Figures:
    """Figures of a placement, from the counts of each rank and the times of the slowest."""
    stored, peak, forward, backward, step, calls, step_calls = zip(*ranks, strict=True)
    return Figures(
        name=name,
        stored=max(stored),
        peak=max(peak),
        forward=sum(forward),
        backward=sum(backward),
        step=sum(step),
        calls=max(calls),
        step_calls=max(step_calls),
        passes_ms=1e3 * median(passes for passes, _ in times),
        passes_spread=spread([passes for passes, _ in times]),
        step_ms=1e3 * median(elapsed for _, elapsed in times),
        step_spread=spread([elapsed for _, elapsed in times]),
    )


def cell(name: str, value: str | float) -> str:
    """A figure of the table."""
    if isinstance(value, float):
        return f"{value:.0%}" if "spread" in name else f"{value:,.1f}"
    return value if isinstance(value, str) else f"{value:,}"


def table(rows: Sequence[Figures]) -> str:
    """Markdown; the last line is the ratio of owned to sharded."""
    names = [field.name for field in fields(Figures)]
    lines = [["placement", *names[1:]], ["---"] + ["---:"] * (len(names) - 1)]
    lines += [[cell(name, getattr(row, name)) for name in names] for row in rows]
    pairs = [(name, *(getattr(row, name) for row in rows)) for name in names[1:]]
    lines.append(["ratio", *(f"{a / b:.3f}" if b and "spread" not in name else "-" for name, a, b in pairs)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def worker(rank: int, nproc: int, folder: str, sizes: dict[str, int], repeats: int, reshard: bool, device: str) -> None:
    """A process; rank 0 writes the rows to the folder."""
    rows = run(rank, nproc, sizes, repeats, reshard, start(rank, nproc, folder, device))
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Arguments:
    """Compare owned matrices with FSDP2 alone by training a few steps."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device. On CUDA each process has a GPU of this machine."""
    nproc: int = 4
    """Processes."""
    dim: int = 512
    """Width of the model."""
    blocks: int = 6
    """Blocks of four attention and two MLP matrices."""
    repeats: int = 15
    """Timed steps of each placement."""
    reshard: bool = True
    """Free the matrices between forward and backward."""
    json: Path | None = None
    """File to write the figures to."""

    def __post_init__(self) -> None:
        for name in ("nproc", "dim", "blocks", "repeats"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} must be at least 1")
        check_device(self.device, self.nproc)
        if self.json is not None and not self.json.parent.is_dir():
            raise SystemExit(f"--json {self.json}: there is no folder {self.json.parent}")


def main(arguments: Arguments) -> None:
    """Run the processes, print the table and write the figures."""
    # Otherwise the profiler of each process logs every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    sizes = {"dim": arguments.dim, "hidden": 11 * arguments.dim // 4, "blocks": arguments.blocks}
    with tempfile.TemporaryDirectory() as folder:
        worker_arguments = (arguments.nproc, folder, sizes, arguments.repeats, arguments.reshard, arguments.device)
        mp.spawn(worker, worker_arguments, arguments.nproc)
        rows = [Figures(**row) for row in json.loads(Path(folder, "rows").read_text())]
    print(f"{sizes}, {arguments.nproc} ranks, medians of {arguments.repeats} steps, bytes\n\n{table(rows)}")
    if arguments.json is not None:
        settings = {
            **sizes,
            "nproc": arguments.nproc,
            "device": arguments.device,
            "repeats": arguments.repeats,
            "reshard": arguments.reshard,
        }
        arguments.json.write_text(json.dumps({**settings, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
