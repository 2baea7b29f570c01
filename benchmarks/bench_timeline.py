"""Whether the planner's timeline is what a clock shows: Muon's step on gloo, played with the rates of this machine.

    python benchmarks/bench_timeline.py --nproc 2 --model dense12

Rates and steps are measured in turns, all ranks at once, and of several the fastest counts: what else the machine does
only adds. Ranks need a core each: two on one would have half of the rate whenever both compute, and the timeline knows
one rate.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.distributed.device_mesh import init_device_mesh

# Run as a script, a file finds only its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_step import barrier, start
from benchmarks.contenders import MODELS, Model, ours, sharded
from benchmarks.gpu.links import link_of, measure_links, memory_rate
from titan_muon import Muon
from titan_muon.orthogonalize import Dispatch, iteration, orthogonalize
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.terms.machine import LARGE_SIDE, MACHINES, Link, MachineRates

LARGEST_MESSAGE = 2**22
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rates:
    """What one rank reached while all others did the same: Newton-Schulz of the model's smallest and largest matrix in
    FLOP/s with the smaller side of each, bytes per second of copies, and of links with the seconds of a call."""

    sides: tuple[int, int]
    flops: tuple[float, float]
    memory: float
    bandwidth: float
    latency: float
    launch: float


def newton_schulz_rate(rows: int, cols: int) -> float:
    """FLOP/s of the method that `auto` takes for such a matrix."""
    computed = iteration("keller_jordan", 5, 1e-7)
    method = Dispatch(device="cpu").choose(rows, cols, computed.steps)
    matrix = torch.randn(1, rows, cols)
    return method.flops(rows, cols, computed.steps) / fastest(lambda: orthogonalize(matrix, computed, method), 5)


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure(model: Model) -> Rates:
    """The rates of this turn, the mean over ranks: the same on each of them, who must plan alike."""
    shapes = sorted(model.shapes.values(), key=lambda shape: (min(shape), max(shape)))
    barrier(CPU)
    flops = tuple(newton_schulz_rate(*shape) for shape in (shapes[0], shapes[-1]))
    one = torch.zeros(1)
    mine = (*flops, memory_rate(CPU), fastest(lambda: one.add_(1), 20))
    ranks: list[Sequence[float]] = [()] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    small, large, memory, launch = (mean(column) for column in zip(*ranks, strict=True))
    bandwidth, latency = link_of(measure_links(CPU, LARGEST_MESSAGE))
    return Rates((min(shapes[0]), min(shapes[-1])), (small, large), memory, bandwidth, latency, launch)


def machine_of(rates: Rates) -> MachineRates:
    """The machine whose rate goes through both measured ones, with one kind of link."""
    # rate(side) = top side / (side + half): two equations for two unknowns.
    (low, high), (slow, fast) = rates.sides, rates.flops
    bend = slow * high / (fast * low)
    half = max(0, round((high - bend * low) / (bend - 1))) if bend > 1 else 0
    top = fast * (high + half) / high * LARGE_SIDE / (LARGE_SIDE + half)
    link = Link(rates.bandwidth, rates.latency)
    return replace(
        MACHINES["cpu"],
        name="measured",
        flops=dict.fromkeys(("bfloat16", "float16", "float32"), top),
        half_side=half,
        memory=rates.memory,
        node=link,
        network=link,
        launch=rates.launch,
    )


@dataclass(frozen=True)
class Turn:
    """Milliseconds of one turn: of the fastest step on its slowest rank, of the timeline, and of its Newton-Schulz."""

    clock: float
    modelled: float
    newton_schulz: float


def take_turn(optimizer: Muon, model: Model, steps: int) -> Turn:
    """Rates, then steps, then rates again: those in the middle are taken to have had the mean of both."""
    before = measure(model)
    taken = [clock(optimizer.step) for _ in range(steps)]
    after = measure(model)
    played = [timeline(optimizer.plan, machine_of(rates)).last for rates in (before, after)]
    return Turn(
        1e3 * min(taken),
        1e3 * mean(rank.seconds for rank in played),
        1e3 * mean(rank.orthogonalize for rank in played),
    )


def clock(run: Callable[[], object]) -> float:
    """Seconds on the slowest rank."""
    barrier(CPU)
    begin = time.perf_counter()
    run()
    slowest = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def worker(rank: int, nproc: int, folder: str, model: str, repeats: int, steps: int) -> None:
    """One process; rank 0 leaves the turns in the folder."""
    start(rank, nproc, folder, "cpu")
    shapes = MODELS[model]
    optimizer = ours("all_to_all", sharded(shapes, init_device_mesh("cpu", (nproc,))), None, "auto")
    clock(optimizer.step)
    turns = [take_turn(optimizer, shapes, steps) for _ in range(repeats)]
    if rank == 0:
        Path(folder, "turns").write_text(json.dumps([asdict(turn) for turn in turns]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main(
    nproc: int = 2,
    model: Literal["peers", "dense12", "tiny"] = "dense12",
    repeats: int = 9,
    steps: int = 5,
) -> float:
    """Print the clock beside the timeline; returns the median of modelled over measured.

    Args:
        nproc: processes, on a core each.
        model: the matrices, see contenders.py.
        repeats: turns.
        steps: of each turn.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (nproc, folder, model, repeats, steps), nproc)
        turns = [Turn(**turn) for turn in json.loads(Path(folder, "turns").read_text(encoding="utf-8"))]
    ratio = median(turn.modelled / turn.clock for turn in turns)
    print(f"{model}, {nproc} ranks, medians of {repeats} turns of {steps} steps\n")
    print("| clock ms | timeline ms | of it Newton-Schulz | timeline / clock |\n|---:|---:|---:|---:|")
    columns = (median(column) for column in zip(*(asdict(turn).values() for turn in turns), strict=True))
    print("| " + " | ".join([*(f"{value:.2f}" for value in columns), f"{ratio:.3f}"]) + " |")
    return ratio


if __name__ == "__main__":
    tyro.cli(main)
