"""The planner's timeline against measured steps of Muon on gloo, with this machine's measured rates.

    python benchmarks/bench_timeline.py --nproc 2 --model dense12

Rates and steps are measured in turns, on all ranks at once, and the fastest of several repetitions counts, because
other load only adds time. Ranks need a core each: two ranks on a core would have half the rate when both compute, and
the timeline has a single rate.
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

# A script finds only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_step import barrier, start
from benchmarks.contenders import MODELS, Model, ours, sharded
from benchmarks.one_gpu.links import link_of, measure_links, memory_rate
from titan_muon import Muon
from titan_muon.engine.orthogonalize import Dispatch, iteration, orthogonalize
from titan_muon.planner.machine import LARGE_SIDE, MACHINES, Link, MachineRates
from titan_muon.planner.timeline import timeline

LARGEST_MESSAGE = 2**22
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rates:
    """A rank's rates while all ranks measure: Newton-Schulz of the model's smallest and largest matrix in FLOP/s with
    their smaller sides, bytes per second of copies, and bytes per second and latency of links.
    """

    sides: tuple[int, int]
    flops: tuple[float, float]
    memory: float
    bandwidth: float
    latency: float
    launch: float


def newton_schulz_rate(rows: int, cols: int) -> float:
    """FLOP/s of `auto`'s method on this shape."""
    computed = iteration("keller_jordan", 5, 1e-7)
    method = Dispatch(device="cpu").choose(rows, cols, computed.steps)
    matrix = torch.randn(1, rows, cols)
    return method.flops(rows, cols, computed.steps) / fastest(lambda: orthogonalize(matrix, computed, method), 5)


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(model: Model) -> Rates:
    """Rates of this turn, averaged over ranks, because all ranks must plan alike."""
    shapes = sorted(model.shapes.values(), key=lambda shape: (min(shape), max(shape)))
    barrier(CPU)
    flops = tuple(newton_schulz_rate(*shape) for shape in (shapes[0], shapes[-1]))
    scalar = torch.zeros(1)
    mine = (*flops, memory_rate(CPU), fastest(lambda: scalar.add_(1), 20))
    ranks: list[Sequence[float]] = [()] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    small, large, memory, launch = (mean(column) for column in zip(*ranks, strict=True))
    bandwidth, latency = link_of(measure_links(CPU, LARGEST_MESSAGE))
    return Rates((min(shapes[0]), min(shapes[-1])), (small, large), memory, bandwidth, latency, launch)


def machine_of(rates: Rates) -> MachineRates:
    """Machine fitted to both measured rates, with a single kind of link."""
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
    """Milliseconds of a turn: fastest step on the slowest rank, modelled step, modelled Newton-Schulz."""

    clock: float
    modelled: float
    newton_schulz: float


def take_turn(optimizer: Muon, model: Model, steps: int) -> Turn:
    """Measure rates, steps, rates: the steps count at the mean of both rates."""
    before = measure(model)
    times = [clock(optimizer.step) for _ in range(steps)]
    after = measure(model)
    played = [timeline(optimizer.plan, machine_of(rates)).last for rates in (before, after)]
    return Turn(
        1e3 * min(times),
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
    """A process; rank 0 writes the turns to the folder."""
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
    """Print measured and modelled times; returns the median of modelled over measured.

    Args:
        nproc: processes, on a core each.
        model: the matrices, see contenders.py.
        repeats: turns.
        steps: steps per turn.
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
