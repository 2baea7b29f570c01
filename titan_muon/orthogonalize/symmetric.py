"""Kernels that compute half of a symmetric product, and the measured choice of kernels on a GPU."""

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
from titan_muon.plan.terms.machine import Choices, choices_of

from .dispatch import Kernel
from .newton_schulz import PLAIN, Products


@dataclass(frozen=True)
class TritonProducts:
    """Kernels of `symmetric_kernel`."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        # On use, because only CUDA builds of PyTorch include Triton.
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
HALVES = ("float16", "bfloat16")
"""Dtypes with kernels. float32 without TF32 (TF32 rounds like float16) cannot use tensor cores."""


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """The kernels for the option `ns_kernel`. Raises OptionError for an unknown name or a kernel without support."""
    check(StepOptions, {"ns_kernel": choice})
    if choice == "auto" and device.type == "cuda" and torch.cuda.is_available():
        file = cache_file(device)
        return known_kernels(file) if file.exists() else shipped_kernels(measured_choices(device))
    if choice in ("auto", "plain"):
        return ()
    if device.type != "cuda" or choice not in installed():
        problem = f"= {choice!r} needs CUDA and the package {PACKAGES[choice]}; install it or choose 'auto'"
        raise OptionError("ns_kernel", problem)
    return tuple(Kernel(dtype, 1, choice) for dtype in HALVES)


def measured_choices(device: torch.device) -> Choices:
    """The choices for this machine's GPU; without a measurement for another device."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return choices_of(torch.cuda.get_device_name(device) if has_gpu else "")


def shipped_kernels(choices: Choices) -> tuple[Kernel, ...]:
    """The measured kernels of a type of GPU whose packages are installed."""
    kernels = (Kernel(**entry) for entry in choices.kernels)
    return tuple(kernel for kernel in kernels if kernel.products in ("plain", *installed()))


def products_of(name: str) -> Products:
    """The products for a name in KERNELS, or `plain`."""
    return PLAIN if name == "plain" else KERNELS[name]


def installed() -> dict[str, str]:
    """Versions of kernel packages."""
    versions = {}
    for kernel, package in PACKAGES.items():
        try:
            versions[kernel] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def cache_file(device: torch.device) -> Path:
    """File of the measurement for this GPU and these versions."""
    root = Path(os.environ["XDG_CACHE_HOME"]) if os.environ.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    gpu = torch.cuda.get_device_name(device)
    versions = "-".join(f"{kernel}{number}" for kernel, number in sorted(installed().items()))
    name = f"{gpu}-torch{torch.__version__}-{versions}".replace(" ", "_").replace("/", "_")
    return root / "titan_muon" / "symmetric" / f"{name}.json"


def known_kernels(file: Path) -> tuple[Kernel, ...]:
    """The measured kernels, or none. Raises ValueError for an invalid file."""
    if not file.exists():
        return ()
    try:
        kernels = tuple(Kernel(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a measurement of kernels ({error}); delete it and measure again") from error
    for kernel in kernels:
        if kernel.products not in ("plain", *KERNELS) or kernel.dtype not in HALVES or not isinstance(kernel.rows, int):
            raise ValueError(f"{file}: not a measurement of kernels ({kernel}); delete it and measure again")
    return kernels
