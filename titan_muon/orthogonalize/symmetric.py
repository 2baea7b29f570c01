"""Symmetric products, by kernels that compute half of them, and the measured choice of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Protocol

import torch
from torch import Tensor

from titan_muon.options import OptionError
from titan_muon.plan.terms.machine import Choices, choices_of

from .dispatch import Kernel


class Product(Protocol):
    """Fills `out` with alpha A B, or with alpha A B + beta C. A is (count, m, k), and the result is symmetric."""

    def __call__(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor
    ) -> None: ...


def plain(a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor) -> None:
    """The product of the device's matrix library."""
    if c is None and alpha == 1:
        torch.bmm(a, b, out=out)
    else:
        # PyTorch copies C to `out` first: up to 2 % of the product on a CPU. C is a factor too, so not in place.
        torch.baddbmm(out if c is None else c, a, b, beta=beta, alpha=alpha, out=out)


PACKAGES: Mapping[str, str] = {"triton": "triton", "quack": "quack-kernels"}
HALVES = ("float16", "bfloat16")
"""Dtypes with kernels. float32 without TF32 (TF32 rounds like float16) cannot use tensor cores."""


def product_of(name: str) -> Product:
    """The product for `plain` or a name in PACKAGES."""
    if name == "triton":
        # On use, because only CUDA builds of PyTorch include Triton.
        from .symmetric_kernel import symmetric_product

        return symmetric_product
    if name == "quack":
        # github.com/Dao-AILab/quack, for Hopper and Blackwell.
        from quack.gemm_interface import gemm_symmetric_out

        return lambda a, b, c=None, *, alpha=1.0, beta=0.0, out: gemm_symmetric_out(
            a, b, out, c, alpha=alpha, beta=beta
        )
    return plain


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """The kernels for the option `ns_kernel`. Raises OptionError for a kernel without support."""
    if choice == "auto":
        kernels = (Kernel(**entry) for entry in measured_choices(device).kernels)
        return tuple(kernel for kernel in kernels if kernel.products in ("plain", *installed()))
    if choice == "plain":
        return ()
    if device.type != "cuda" or choice not in installed():
        problem = f"= {choice!r} needs CUDA and the package {PACKAGES[choice]}; install it or choose 'auto'"
        raise OptionError("ns_kernel", problem)
    return tuple(Kernel(dtype, 1, choice) for dtype in HALVES)


def measured_choices(device: torch.device) -> Choices:
    """The choices for this machine's GPU; without a measurement for another device."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return choices_of(torch.cuda.get_device_name(device) if has_gpu else "")


def installed() -> list[str]:
    """The kernels whose packages are installed."""
    return [kernel for kernel, package in PACKAGES.items() if any(distributions(name=package))]
