"""Rates of the links between this machine's GPUs and of the matrix units: the machine file.

    torchrun --nproc_per_node=8 -m benchmarks.one_gpu.links --device cuda --json links.json

`machine` of the file has the planner's rates: bytes per second sent by a
rank, latency of a collective, FLOP/s by dtype, and bytes per second of memory. `recipe` is the equivalent `[machine]`
table of a recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SMALLEST, LARGEST = 2**10, 2**28
DTYPES = ("bfloat16", "float16", "float32")
MATMUL_SIZES = {"cuda": 8192, "cpu": 256}
COPIED = {"cuda": 2**30, "cpu": 2**20}


@dataclass(frozen=True)
class Row:
    """A collective at a size.

    Attributes:
        bytes: whole buffer on a rank: the input of an all-to-all or a reduce-scatter, the output of an all-gather.
        us: median time on the slowest rank, in microseconds.
        gb_s: gigabytes per second sent by each rank.
    """

    collective: str
    bytes: int
    us: float
    gb_s: float


@dataclass(frozen=True)
class MeasuredMachine:
    """The planner's rates of a machine.

    Attributes:
        gpu: name of a GPU.
        ranks: number of ranks in the measurement.
        ranks_per_node: ranks on a node.
        bandwidth: bytes per second sent by a rank; None for a single rank.
        latency: seconds of a collective without data; None for a single rank.
        flops: FLOP/s of large plain products by dtype, float32 without TF32.
        memory_bandwidth: bytes per second, read and written together.
    """

    gpu: str
    ranks: int
    ranks_per_node: int
    bandwidth: float | None
    latency: float | None
    flops: dict[str, float]
    memory_bandwidth: float


def begin(device: str) -> torch.device:
    """Join the processes of torchrun, over gloo or NCCL. Returns this rank's device."""
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine)
    return mine


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call with the device's work; two calls warm up."""
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def wait(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collectives(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The collectives of the exchanges, on buffers of `size` bytes."""
    world = dist.get_world_size()
    whole = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    other, part = torch.empty_like(whole), torch.zeros(size // 2 // world, dtype=torch.bfloat16, device=device)
    return {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }


def measure_links(device: torch.device, largest: int) -> list[Row]:
    """Every collective at sizes from SMALLEST on, by factors of four; equal on every rank."""
    world, rows, size = dist.get_world_size(), [], SMALLEST
    while size <= largest:
        for name, run in collectives(size, device).items():
            dist.barrier()
            elapsed = torch.tensor(seconds(run, device, 20 if size < 2**24 else 5), device=device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            slowest = elapsed.item()
            rows.append(Row(name, size, 1e6 * slowest, size * (world - 1) / world / slowest / 1e9))
        size *= 4
    return rows


def link_of(rows: Sequence[Row]) -> tuple[float, float]:
    """Bandwidth and latency of an all-to-all: from the difference of two sizes, and from the smallest size."""
    # Time is latency plus bytes / bandwidth, so the difference of the largest two sizes gives the bandwidth without
    # latency.
    mine = sorted((row for row in rows if row.collective == "all_to_all"), key=lambda row: row.bytes)
    sent = [row.gb_s * row.us * 1e3 for row in mine]
    longer = (mine[-1].us - mine[-2].us) * 1e-6 if len(mine) > 1 else 0.0
    # If noise makes the larger size faster, use the plain rate.
    bandwidth = (sent[-1] - sent[-2]) / longer if longer > 0 else mine[-1].gb_s * 1e9
    return bandwidth, mine[0].us * 1e-6


def matmul_rate(dtype: str, device: torch.device) -> float:
    """FLOP/s of a large plain product."""
    size = MATMUL_SIZES[device.type]
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / seconds(lambda: torch.mm(a, b), device, 7)


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a large copy."""
    source = torch.zeros(COPIED[device.type] // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, 7)


def measured_machine(links: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """The machine file's rates, with those of its links."""
    bandwidth, latency = link_of(links) if links else (None, None)
    flops = {dtype: matmul_rate(dtype, device) for dtype in DTYPES}
    name, ranks = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return asdict(MeasuredMachine(name, ranks, ranks_per_node, bandwidth, latency, flops, memory_rate(device)))


def main(words: Sequence[str]) -> int:
    """Measure on this rank; rank 0 prints and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    device = begin(options.device)
    rows = measure_links(device, options.largest) if dist.get_world_size() > 1 else []
    if dist.get_rank() == 0:
        document = {"machine": measured_machine(rows, device), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(document["machine"], indent=1))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
