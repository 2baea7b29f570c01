"""Symmetric products by kernels that compute half of them, and where on a GPU they were measured to win."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from .dispatch import DTYPES, Kernel
from .products import PLAIN, Products

MARGIN = 1.05
"""How much faster a kernel must be to be used."""
TOLERANCES: Mapping[str, float] = {"float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference from a plain product, relative, that a kernel may have to be used."""
SIZES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class TritonProducts:
    """This package's own kernel, see `symmetric_kernel`."""

    def gram(self, x: Tensor, out: Tensor) -> None:
        """Fill `out` with X Xᵀ."""
        from .symmetric_kernel import symmetric_product

        symmetric_product(x, x.mT, None, out)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I."""
        from .symmetric_kernel import symmetric_product

        symmetric_product(a, b, c, out, alpha=alpha, beta=beta, delta=delta)


@dataclass(frozen=True)
class QuackProducts:
    """`gemm_symmetric` of quack-kernels (github.com/Dao-AILab/quack), for Hopper and Blackwell."""

    def gram(self, x: Tensor, out: Tensor) -> None:
        """Fill `out` with X Xᵀ."""
        from quack.gemm_interface import gemm_symmetric_out

        gemm_symmetric_out(x, x.mT, out)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I."""
        from quack.gemm_interface import gemm_symmetric_out

        gemm_symmetric_out(a, b, out, c, alpha=alpha, beta=beta)
        if delta != 0:
            out.diagonal(dim1=1, dim2=2).add_(delta)


KERNELS: Mapping[str, Products] = {"triton": TritonProducts(), "quack": QuackProducts()}
PACKAGES: Mapping[str, str] = {"triton": "triton", "quack": "quack-kernels"}
"""The distribution that each kernel needs."""


KERNEL_CHOICES = ("auto", "plain", *KERNELS)


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """What `muon.ns_kernel` comes to on a device: `auto` is what was measured to win there.

    Raises ValueError for an unknown name, and for a kernel that cannot run there.
    """
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"muon.ns_kernel = {choice!r} is unknown; choose from: {', '.join(KERNEL_CHOICES)}")
    if choice == "auto" and device.type == "cuda" and torch.cuda.is_available():
        return known_kernels(cache_file(device))
    if choice in ("auto", "plain"):
        return ()
    if device.type != "cuda" or choice not in installed():
        raise ValueError(
            f"muon.ns_kernel = {choice!r} needs CUDA and the package {PACKAGES[choice]}; install it or choose 'auto'"
        )
    return tuple(Kernel(dtype, 1, choice) for dtype in TOLERANCES)


def products_of(name: str) -> Products:
    """The products of a name in KERNELS, or `plain`."""
    return PLAIN if name == "plain" else KERNELS[name]


def installed() -> dict[str, str]:
    """The version of each package that a kernel needs, of those that are there."""
    found = {}
    for kernel, package in PACKAGES.items():
        try:
            found[kernel] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cache_file(device: torch.device) -> Path:
    """Where the measurement for this GPU and these versions is kept, under XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ["XDG_CACHE_HOME"]) if os.environ.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    gpu = torch.cuda.get_device_name(device)
    versions = "-".join(f"{kernel}{number}" for kernel, number in sorted(installed().items()))
    name = f"{gpu}-torch{torch.__version__}-{versions}".replace(" ", "_").replace("/", "_")
    return root / "titan_muon" / "symmetric" / f"{name}.json"


def known_kernels(file: Path) -> tuple[Kernel, ...]:
    """What was measured to win, or nothing if nothing was measured. Raises ValueError for a file that is not such."""
    if not file.exists():
        return ()
    try:
        found = tuple(Kernel(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a measurement of kernels ({error}); delete it and measure again") from error
    for kernel in found:
        if kernel.products not in ("plain", *KERNELS) or kernel.dtype not in DTYPES or not isinstance(kernel.rows, int):
            raise ValueError(f"{file}: not a measurement of kernels ({kernel}); delete it and measure again")
    return found


def save_kernels(kernels: Sequence[Kernel], file: Path) -> None:
    """Keep a measurement; a reader finds the old one or the new one whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def measure_kernels(device: torch.device, sizes: Sequence[int] = SIZES) -> Iterator[Kernel]:
    """The fastest products on a CUDA device by dtype and smaller side, as they are measured; waits for the device."""
    for dtype in TOLERANCES:
        for size in sizes:
            count = max(1, (2048 // size) ** 2)
            x = torch.randn(count, size, 2 * size, device=device).div_(size).to(DTYPES[dtype])
            seconds = {"plain": _seconds(PLAIN, x)}
            for name in installed():
                if _agrees(KERNELS[name], x, TOLERANCES[dtype]):
                    seconds[name] = MARGIN * _seconds(KERNELS[name], x)
            best = min(seconds, key=lambda name: seconds[name])
            yield Kernel(dtype, size, best)


def _products(products: Products, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two products that an iteration makes: X Xᵀ, and a polynomial in it."""
    gram = x.new_empty(x.size(0), x.size(1), x.size(1))
    polynomial = torch.empty_like(gram)
    products.gram(x, out=gram)
    products.symmetric(gram, gram, gram, alpha=2.0, beta=-5.0, delta=3.0, out=polynomial)
    return gram, polynomial


def _agrees(products: Products, x: Tensor, tolerance: float) -> bool:
    """Whether a kernel runs on this device and gives what plain products give."""
    try:
        found = _products(products, x)
    except Exception:
        # Whatever a kernel's own package raises on a GPU that it does not know: it is not used there.
        return False
    pairs = zip(found, _products(PLAIN, x), strict=True)
    return all(bool((f.float() - e.float()).norm() <= tolerance * e.float().norm()) for f, e in pairs)


def _seconds(products: Products, x: Tensor, repeats: int = 10) -> float:
    """Median time of both products."""
    _products(products, x)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _products(products, x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
