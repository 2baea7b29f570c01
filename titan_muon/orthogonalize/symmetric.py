"""Symmetric products by kernels that compute half of them, and where on a GPU they were measured to win."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from titan_muon.options import OptionError, StepOptions, check

from .dispatch import Kernel
from .products import PLAIN, Products


@dataclass(frozen=True)
class TritonProducts:
    """This package's own kernels, see `symmetric_kernel`."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        # Here and not above: Triton comes with CUDA builds of PyTorch alone.
        from .symmetric_kernel import symmetric_product

        symmetric_product(x, x.mT, None, out, alpha=alpha)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        from .symmetric_kernel import symmetric_product

        symmetric_product(a, b, c, out, alpha=alpha, beta=beta, delta=delta)


@dataclass(frozen=True)
class QuackProducts:
    """`gemm_symmetric` of quack-kernels (github.com/Dao-AILab/quack), for Hopper and Blackwell."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        from quack.gemm_interface import gemm_symmetric_out

        gemm_symmetric_out(x, x.mT, out, alpha=alpha)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        from quack.gemm_interface import gemm_symmetric_out

        gemm_symmetric_out(a, b, out, c, alpha=alpha, beta=beta)
        if delta != 0:
            out.diagonal(dim1=1, dim2=2).add_(delta)


KERNELS: Mapping[str, Products] = {"triton": TritonProducts(), "quack": QuackProducts()}
PACKAGES: Mapping[str, str] = {"triton": "triton", "quack": "quack-kernels"}
"""The distribution that each kernel needs."""
HALVES = ("float16", "bfloat16")
"""What kernels are used for. float32 without TF32, which rounds as float16 does, has no tensor cores to win by."""


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """What the option `ns_kernel` comes to on a device: `auto` is what was measured to win there.

    Raises OptionError for an unknown name, and for a kernel that cannot run there.
    """
    check(StepOptions, {"ns_kernel": choice})
    if choice == "auto" and device.type == "cuda" and torch.cuda.is_available():
        return known_kernels(cache_file(device))
    if choice in ("auto", "plain"):
        return ()
    if device.type != "cuda" or choice not in installed():
        problem = f"= {choice!r} needs CUDA and the package {PACKAGES[choice]}; install it or choose 'auto'"
        raise OptionError("ns_kernel", problem)
    return tuple(Kernel(dtype, 1, choice) for dtype in HALVES)


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
        if kernel.products not in ("plain", *KERNELS) or kernel.dtype not in HALVES or not isinstance(kernel.rows, int):
            raise ValueError(f"{file}: not a measurement of kernels ({kernel}); delete it and measure again")
    return found
