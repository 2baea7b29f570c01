"""Accuracy of Newton-Schulz in float16 on matrices with a dominating row or column, where it could overflow.

    python -m benchmarks.one_gpu.float16 --device cuda --json float16.json

A GPU's library may split a sum and add the parts in float16, as PyTorch allows by default. X has norm 2^10 there. A row
with most of this norm has a squared norm above float16's 65,504 until the product is scaled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy import relative_error
from titan_muon.engine.orthogonalize import Method, iterate, iteration, orthogonalize
from titan_muon.kernels.dispatch import restarts

JORDAN = iteration("keller_jordan", 5, 1e-7)
SHAPES: Mapping[str, Sequence[tuple[int, int, int]]] = {
    "cuda": ((1, 64, 8192), (1, 192, 7168), (1, 256, 16384), (1, 1024, 4096), (1, 128, 28672), (8, 256, 512)),
    "cpu": ((1, 32, 256), (2, 24, 48)),
}
DOMINANCE = 1000.0
ALLOWED = 1.5
"""Largest error of float16 relative to bfloat16's, with an eighth of the precision."""
LEAST = 5e-2
"""An error below this is never a fault."""


def one_row(x: Tensor) -> None:
    """Scale the first row up."""
    x[:, 0] *= DOMINANCE


def one_column(x: Tensor) -> None:
    """Scale the first column up."""
    x[:, :, 0] *= DOMINANCE


def rank_one(x: Tensor) -> None:
    """Add a matrix of rank 1."""
    x.add_(DOMINANCE * x[:, :, :1] @ x[:, :1])


KINDS: Mapping[str, Callable[[Tensor], object]] = {
    "gaussian": lambda x: None,
    "one row": one_row,
    "one column": one_column,
    "rank 1": rank_one,
}


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Error of each method against float64 by shape and kind, with and without sums in float16."""
    methods = (Method("standard", "bfloat16"), Method("standard", "float16"), Method("gram", "float16", restarts(5)))
    for shape in SHAPES[device.type]:
        for kind, changed in KINDS.items():
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            changed(x)
            x = x.bfloat16()
            # In float64 on the device: seconds on a CPU for the larger shapes.
            exact = iterate(x.to(device).double(), JORDAN.steps, JORDAN.eps, torch.float64)
            for reduced in (True, False):
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced
                errors = {str(method): _error(x.to(device), method, exact) for method in methods}
                yield {"shape": "x".join(map(str, shape)), "matrix": kind, "sums in float16": reduced, **errors}


def _error(x: Tensor, method: Method, exact: Tensor) -> float:
    found = orthogonalize(x.float(), JORDAN, method)
    return float(relative_error(found, exact).max()) if bool(found.isfinite().all()) else float("inf")


def faults_of(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with a worse float16 than bfloat16, under PyTorch's default of the sums."""
    faults = []
    for row in measured:
        errors = {name: error for name, error in row.items() if isinstance(error, float)}
        limit = max(LEAST, ALLOWED * next(error for name, error in errors.items() if "bfloat16" in name))
        worse = [f"{name}: {error:.3g}" for name, error in errors.items() if not error <= limit]
        if worse and row["sums in float16"]:
            faults.append(f"{row['shape']}, {row['matrix']}: {', '.join(worse)}")
    return faults


def main(words: Sequence[str]) -> int:
    """Measure, print and write. Returns 0 also for an unsafe float16, which is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    measured = list(rows(torch.device(options.device)))
    faults = faults_of(measured)
    document = {"is_safe": not faults, "unsafe": faults, "rows": measured}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in measured:
        print({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()})
    print("\n".join(faults) if faults else "float16 is safe")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
