"""Newton-Schulz by shape against the same GPU's matmul rate: bench_orthogonalize.py without errors.

    python -m benchmarks.gpu.newton_schulz --device cuda --json newton_schulz.json

CUDA measures the symmetric kernels first and keeps the result for later runs of Muon, as bench_orthogonalize.py does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import bench_orthogonalize as bench
from benchmarks.gpu.links import matmul_rate
from benchmarks.measure_kernels import measure_kernels, save_kernels
from titan_muon.orthogonalize import Method
from titan_muon.orthogonalize.dispatch import restarts
from titan_muon.orthogonalize.symmetric import cache_file, kernels_for

TINY = ((2, 32, 64), (1, 48, 48))
REPEATS = {"cuda": 7, "cpu": 1}


def tiny_shapes(measured: bench.Bench) -> Iterator[bench.Row]:
    """Every algorithm on tiny shapes instead of the published models'."""
    for count, rows, cols in TINY:
        methods = (Method("standard", "float32"), Method("gram", "float32", restarts(5)), measured.auto(rows, cols))
        contenders = [bench.torchs(rows, cols, count), *(bench.ours(method, rows, cols, count) for method in methods)]
        yield from bench.compare("tiny", (count, rows, cols), contenders, measured)


def main(words: Sequence[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    device = torch.device(options.device)
    if device.type == "cuda":
        save_kernels(list(measure_kernels(device)), cache_file(device))
    rate = matmul_rate("bfloat16", device)
    measured = bench.Bench(device, REPEATS[device.type], rate, kernels_for("auto", device))
    published = (bench.real_shapes, bench.small_stacks)
    rows = [row for part in (published if device.type == "cuda" else (tiny_shapes,)) for row in part(measured)]
    print(bench.table(rows))
    document = {**bench.machine(measured), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
