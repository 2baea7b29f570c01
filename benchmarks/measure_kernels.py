"""Measures the fastest kernel for symmetric products on this GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from titan_muon.engine.orthogonalize import DTYPES, Product
from titan_muon.engine.orthogonalize.newton_schulz import plain
from titan_muon.kernels.dispatch import Kernel, installed, product_of

MARGIN = 1.05
"""Minimum speedup of a kernel."""
TOLERANCES: Mapping[str, float] = {"float16": 4e-3, "bfloat16": 3e-2}
"""Largest accepted difference from a plain product, relative."""
SIZES: tuple[tuple[int, int], ...] = (
    (64, 64),
    (128, 32),
    (128, 200),
    (192, 64),
    (256, 64),
    (768, 16),
    (768, 128),
    (1024, 1),
    (2048, 4),
)
SIZES += ((2048, 8), (4096, 1), (7168, 1), (8192, 1))
"""(smaller side, matrices)."""


def measure_kernels(device: torch.device, sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Kernel]:
    """Fastest products on a CUDA device by dtype, smaller side and count; waits for the device."""
    for dtype in TOLERANCES:
        for size, count in sizes:
            x = torch.randn(count, size, 2 * size, device=device).div_(size).to(DTYPES[dtype])
            seconds = {"plain": _seconds(plain, x)}
            for name in installed():
                if _agrees(name, x, TOLERANCES[dtype]):
                    seconds[name] = MARGIN * _seconds(product_of(name) or plain, x)
            best = min(seconds, key=lambda name: seconds[name])
            yield Kernel(dtype, size, best, count)


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """Replay of a call's kernels without the host."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _products(product: Product, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two products of an iteration: X Xᵀ, and a polynomial in X Xᵀ."""
    gram = x.new_empty(x.size(0), x.size(1), x.size(1))
    polynomial = torch.empty_like(gram)
    product(x, x.mT, out=gram)()
    product(gram, gram, gram, alpha=2.0, beta=-5.0, out=polynomial)()
    return gram, polynomial


def _agrees(name: str, x: Tensor, tolerance: float) -> bool:
    """Whether a kernel runs on this device and agrees with plain products."""
    try:
        results = _products(product_of(name) or plain, x)
    except Exception:
        # A kernel's package may raise any error on an unknown GPU.
        return False
    pairs = zip(results, _products(plain, x), strict=True)
    return all(bool((f.float() - e.float()).norm() <= tolerance * e.float().norm()) for f, e in pairs)


def _seconds(product: Product, x: Tensor, repeats: int = 10) -> float:
    """Median time of both products, without the host."""
    replay, times = graph_of(partial(_products, product, x)), list[float]()
    replay()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
