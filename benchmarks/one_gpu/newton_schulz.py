"""Newton-Schulz by shape and kernel against the same GPU's matmul rate: eager, as a CUDA graph, and the host's share.

    python -m benchmarks.one_gpu.newton_schulz --device cuda --json newton_schulz.json

CUDA measures the symmetric kernels first and keeps the result for later runs of Muon, as bench_orthogonalize.py does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_orthogonalize import JORDAN, MODELS, torch_loop
from benchmarks.measure_kernels import graph_of, measure_kernels
from benchmarks.one_gpu.links import matmul_rate, seconds, wait
from titan_muon.engine.orthogonalize import Method, orthogonalize
from titan_muon.kernels.dispatch import GRAM_ASPECT, HALVES, KERNEL_SIDES, Dispatch, Kernel, installed, restarts
from titan_muon.options import Machine
from titan_muon.planner.machine import LAUNCHES, MachineRates, planning_machine

Shape = tuple[int, int, int]
SHAPES: Mapping[str, Mapping[str, Sequence[Shape]]] = {
    "cuda": {
        **MODELS,
        "Qwen3-30B-A3B": ((16, 768, 2048), (128, 768, 2048), (4, 4096, 2048)),
        "Kimi K2": ((8, 2048, 7168), (64, 192, 1536), (64, 256, 512), (1, 7168, 18432)),
        "small": ((64, 64, 64), (200, 128, 128), (32, 128, 512)),
    },
    "cpu": {"tiny": ((2, 32, 64), (1, 48, 48))},
}
REPEATS = {"cuda": 7, "cpu": 1}
TORCH = "torch.optim.Muon"


def methods(rows: int, cols: int, device: torch.device) -> list[Method]:
    """The methods to compare on a shape."""
    if device.type == "cpu":
        return [Method("standard", "float32"), Method("gram", "float32", restarts(5))]
    small, large = sorted((rows, cols))
    plain = [Method("standard", dtype) for dtype in HALVES]
    plain += [Method("gram", "float16", restarts(5))] if large >= GRAM_ASPECT * small else []
    kernels = installed() if rows % KERNEL_SIDES == cols % KERNEL_SIDES == 0 else ()
    symmetric = [Method(m.algorithm, m.dtype, m.restarts, kernel) for kernel in kernels for m in plain[1:]]
    return [*plain, *symmetric]


def times(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of a call, of its graph, and of the host to launch it."""
    repeats = REPEATS[device.type]
    found = {"ms": 1e3 * seconds(run, device, repeats)}
    wait(device)
    begin = time.perf_counter()
    run()
    found["host ms"] = 1e3 * (time.perf_counter() - begin)
    wait(device)
    if device.type == "cuda":
        found["graph ms"] = 1e3 * seconds(graph_of(run), device, repeats)
    return found


def modelled(method: Method, shape: Shape, rates: MachineRates) -> float:
    """Milliseconds by the planner."""
    count, rows, cols = shape
    flops = count * method.flops(rows, cols, JORDAN.steps)
    return 1e3 * max(flops / rates.rate(method.dtype, min(rows, cols)), LAUNCHES * rates.launch)


def compared(device: torch.device, rate: float, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """A row for each shape and method, and for torch.optim.Muon's loop over the matrices."""
    dispatch = Dispatch("auto", "auto", device.type, tuple(kernels))
    rates = planning_machine(Machine(), device.type)
    for model, shapes in SHAPES[device.type].items():
        for shape in shapes:
            count, rows, cols = shape
            stack = torch.randn(shape, device=device).bfloat16()
            chosen = dispatch.choose(rows, cols, JORDAN.steps)
            named = {"model": model, "shape": f"{count} x {rows} x {cols}"}
            if count <= 8:
                yield {**named, "method": TORCH, "ms": 1e3 * seconds(partial(torch_loop, stack), device, 1)}
            for method in methods(rows, cols, device):
                row = {**named, "method": str(method), "auto": "x" if method == chosen else ""}
                try:
                    spent = times(partial(orthogonalize, stack, JORDAN, method), device)
                except Exception as error:
                    # A kernel's package may raise any error on an unknown GPU.
                    yield {**row, "fault": f"{type(error).__name__}: {error}"[:200]}
                    continue
                share = 1e3 * count * method.flops(rows, cols, JORDAN.steps) / spent["ms"] / rate
                yield {**row, **spent, "modelled ms": modelled(method, shape, rates), "of matmul": share}


def main(words: Sequence[str]) -> int:
    """Measure, print and write; the file is renewed after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    device = torch.device(options.device)
    kernels = list(measure_kernels(device)) if device.type == "cuda" else []
    rate = matmul_rate("bfloat16", device)
    document: dict[str, Any] = {"matmul TFLOP/s": rate / 1e12, "kernels": [asdict(kernel) for kernel in kernels]}
    rows = []
    for row in compared(device, rate, kernels):
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        options.json.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
