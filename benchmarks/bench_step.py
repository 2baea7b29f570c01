"""Time, traffic, work, memory and accuracy of an optimizer step, side by side, on the CPU or on GPUs.

Each process has one thread on the CPU over gloo, or a GPU over NCCL with `--device cuda`. All optimizers step the same
sharded parameters with the same gradients. Timed steps take turns, so that other load on the machine affects all of
them equally.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

# A script finds only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import spread
from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.contenders import INITIAL, MODELS, Builder, Model, Parameters, Steps, contenders, sharded
from benchmarks.memory_use import allocated, kept

REFERENCE = "torch.optim.Muon, gathered"
BASES = ("all_gather", "DistMuon")


@dataclass(frozen=True)
class Counts:
    """Counts of a rank in a step.

    Attributes:
        bytes_sent: to other ranks.
        calls: collectives of matrices.
        agreements: all-reduces of at most 4 bytes per parameter for faults, and 16 for hyperparameters and steps.
        ns_flops: FLOPs of matrix products.
        bytes_kept: allocated at construction or in the first step, without sharded momentum.
        bytes_new: largest further allocation during a later step.
    """

    bytes_sent: int
    calls: int
    agreements: int
    ns_flops: int
    bytes_kept: int
    bytes_new: int


@dataclass(frozen=True)
class Row:
    """Results of an optimizer; counts are the busiest rank's.

    Attributes:
        ms: median over the timed steps of the slowest rank's time.
        spread: of the slowest rank's times.
        ratios: medians of the time over each of BASES in the same turn; 0 for a base that cannot run here.
        cpu_ms: median over the timed steps of the CPU time, user and system, of all ranks together. More reliable than
            `ms` beside other programs, because waiting takes no CPU time.
        cpu_ratios: like `ratios`, of the CPU time.
        error: of the update after three steps against REFERENCE, relative, in the Frobenius norm.
    """

    name: str
    ms: float
    spread: float
    ratios: tuple[float, ...]
    cpu_ms: float
    cpu_ratios: tuple[float, ...]
    counts: Counts
    error: float
    bitwise: bool


@dataclass
class Contender:
    """An optimizer and its parameters, after three steps."""

    name: str
    params: Parameters
    optimizer: Steps
    counts: Counts


def prepare(name: str, build: Builder, model: Model, mesh: DeviceMesh) -> Contender:
    """Build an optimizer and take three steps: first time with construction, then memory, then counts."""
    params = sharded(model, mesh)

    def first() -> Steps:
        optimizer = build(params, mesh)
        optimizer.step()
        return optimizer

    device = next(iter(params.values())).device
    optimizer, left = kept(first, device)
    _, new, _ = allocated(optimizer.step, device)
    with FlopCounterMode(display=False) as flops, CollectiveCounter() as counter:
        optimizer.step()
    agreements = [call for call in counter.calls if call.name == "allreduce" and call.payload <= 4 * len(params) + 16]
    matrices = [call for call in counter.calls if call not in agreements]
    momentum = sum(param.to_local().nbytes for param in params.values())  # type: ignore[attr-defined]
    sent = sum(call.sent for call in matrices)
    counts = Counts(sent, len(matrices), len(agreements), flops.get_total_flops(), left - momentum, new)
    return Contender(name, params, optimizer, counts)


def finish(device: torch.device) -> None:
    """Wait for this process's GPU queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device: torch.device) -> None:
    """Synchronize all processes, with empty queues."""
    finish(device)
    dist.barrier()
    finish(device)


def timed(contenders: Sequence[Contender], repeats: int, device: torch.device) -> list[list[tuple[float, float]]]:
    """Seconds and CPU seconds of this rank's steps by repetition and contender, with rotating order."""
    seconds = []
    for repeat in range(repeats):
        row = [(0.0, 0.0)] * len(contenders)
        for place in range(len(contenders)):
            index = (repeat + place) % len(contenders)
            barrier(device)
            start, cpu = time.perf_counter(), time.process_time()
            contenders[index].optimizer.step()
            finish(device)
            row[index] = time.perf_counter() - start, time.process_time() - cpu
        seconds.append(row)
    return seconds


def updates(contender: Contender, model: Model) -> Tensor:
    """Changes of all parameters in a vector; whole on every rank."""
    whole = model.full(INITIAL)
    with torch.no_grad():
        parts = [param.full_tensor().cpu() - whole[name] for name, param in contender.params.items()]  # type: ignore[attr-defined]
    return torch.cat([part.flatten() for part in parts])


def run(model: Model, mesh: DeviceMesh, repeats: int) -> list[Row]:
    """The table, equal on every rank."""
    prepared = [prepare(name, build, model, mesh) for name, build in contenders(mesh.device_type).items()]
    expected = updates(next(c for c in prepared if c.name == REFERENCE), model)
    errors = [updates(contender, model) - expected for contender in prepared]
    device = next(iter(prepared[0].params.values())).device
    mine = (timed(prepared, repeats, device), [contender.counts for contender in prepared])
    ranks: list[Any] = [None] * mesh.size()
    dist.all_gather_object(ranks, mine)
    slowest, together = combined([seconds for seconds, _ in ranks])
    names = [contender.name for contender in prepared]
    return [
        Row(
            name=contender.name,
            ms=1e3 * median(turn[index] for turn in slowest),
            spread=spread([turn[index] for turn in slowest]),
            ratios=tuple(ratio(slowest, index, names, base) for base in BASES),
            cpu_ms=1e3 * median(turn[index] for turn in together),
            cpu_ratios=tuple(ratio(together, index, names, base) for base in BASES),
            counts=Counts(*(max(values) for values in zip(*(astuple(r[1][index]) for r in ranks), strict=True))),
            error=float(errors[index].norm() / expected.norm()),
            bitwise=not errors[index].any(),
        )
        for index, contender in enumerate(prepared)
    ]


def combined(ranks: Sequence[Sequence[Sequence[tuple[float, float]]]]) -> tuple[list[list[float]], list[list[float]]]:
    """By turn and contender, the slowest rank's time and the CPU time of all ranks, from each rank's `timed`."""
    turns = [[tuple(zip(*cell, strict=True)) for cell in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True)]
    return (
        [[max(times) for times, _ in turn] for turn in turns],
        [[sum(cpu) for _, cpu in turn] for turn in turns],
    )


def ratio(turns: Sequence[Sequence[float]], index: int, names: Sequence[str], base: str) -> float:
    """Median of a contender's time over a base's in the same turn; 0 without the base."""
    return median(turn[index] / turn[names.index(base)] for turn in turns) if base in names else 0.0


def table(rows: Sequence[Row]) -> str:
    """Markdown. Memory is the sum of kept and new bytes."""
    ratios = [f"/ {base}" for base in BASES]
    head = [
        "optimizer",
        "ms",
        "spread",
        *ratios,
        "CPU ms",
        *ratios,
        "MB sent",
        "calls",
        "NS GFLOP",
        "extra MB",
        "new in step",
        "update error",
    ]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        c = row.counts
        memory = [f"{(c.bytes_kept + c.bytes_new) / 1e6:.2f}", f"{c.bytes_new / 1e6:.2f}"]
        work = [f"{c.bytes_sent / 1e6:.2f}", str(c.calls), f"{c.ns_flops / 1e9:.2f}"]
        error = "0, bitwise" if row.bitwise else f"{row.error:.1e}"
        times = [f"{row.ms:.1f}", f"{row.spread:.0%}", *(f"{r:.3f}" for r in row.ratios)]
        times += [f"{row.cpu_ms:.1f}", *(f"{r:.3f}" for r in row.cpu_ratios)]
        lines.append([row.name, *times, *work, *memory, error])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def start(rank: int, nproc: int, folder: str, device: str) -> torch.device:
    """Set up device and process group of this process."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    mine = torch.device(device) if device == "cpu" else torch.device(device, rank)
    if device == "cuda":
        torch.cuda.set_device(mine)
    backend, bound = ("gloo", None) if device == "cpu" else ("nccl", mine)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=nproc, device_id=bound)
    return mine


def worker(rank: int, nproc: int, folder: str, model: str, repeats: int, device: str) -> None:
    """A process; rank 0 writes the rows to the folder."""
    start(rank, nproc, folder, device)
    rows = run(MODELS[model], init_device_mesh(device, (nproc,), mesh_dim_names=("shard",)), repeats)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def check_device(device: str, nproc: int) -> None:
    """Raise SystemExit for more processes than GPUs."""
    if device == "cuda" and torch.cuda.device_count() < nproc:
        raise SystemExit(f"--device cuda --nproc {nproc}: PyTorch finds {torch.cuda.device_count()} CUDA devices here")


@dataclass(frozen=True)
class Arguments:
    """Compare optimizers by one step."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device. On CUDA each process has a GPU of this machine."""
    nproc: int = 4
    """Processes; parameters are sharded in rows over them."""
    model: Literal["peers", "dense12", "small", "tiny", "gpu"] = "peers"
    """The matrices, see contenders.py."""
    repeats: int = 15
    """Timed steps of each optimizer."""
    json: Path | None = None
    """File to write the figures to."""

    def __post_init__(self) -> None:
        for name in ("nproc", "repeats"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} must be at least 1")
        check_device(self.device, self.nproc)
        if self.json is not None and not self.json.parent.is_dir():
            raise SystemExit(f"--json {self.json}: there is no folder {self.json.parent}")


def main(arguments: Arguments) -> None:
    """Run the processes, print the table and write the figures."""
    # Otherwise the profiler of each process logs every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            worker, (arguments.nproc, folder, arguments.model, arguments.repeats, arguments.device), arguments.nproc
        )
        figures = json.loads(Path(folder, "rows").read_text())
    rows = [Row(**{**row, "counts": Counts(**row["counts"])}) for row in figures]
    print(f"{arguments.model}, {arguments.nproc} ranks, medians of {arguments.repeats} steps\n\n{table(rows)}")
    if arguments.json is not None:
        names = ("model", "nproc", "repeats", "device")
        settings = {name: getattr(arguments, name) for name in names}
        arguments.json.write_text(json.dumps({**settings, "rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
