"""Measured symmetric kernels by type of GPU."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from ..engine.orthogonalize import Product
from ..options import OptionError
from .dispatch import HALVES, Kernel

MEASURED = Path(__file__).with_name("measured.json")
"""Kernels by the name of a GPU, by hand from `benchmarks/one_gpu/newton_schulz.py`."""
CAPABILITIES = (9, 10)
"""Major compute capabilities with symmetric kernels."""


def measured_kernels(gpu: str, file: Path = MEASURED) -> list[dict[str, Any]]:
    """Fields of `orthogonalize.Kernel` for a GPU's name; none without a measurement."""
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")).get(gpu, {}).get("kernels", [])
    return [entry for entry in entries if entry["products"] in ("plain", *installed())]


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """The kernels for the option `ns_kernel`. Raises OptionError for a kernel without support."""
    if choice == "auto":
        has_gpu = device.type == "cuda" and torch.cuda.is_available()
        entries = measured_kernels(torch.cuda.get_device_name(device)) if has_gpu else ()
        return tuple(Kernel(**entry, product=product_of(entry["products"])) for entry in entries)
    if choice == "plain":
        return ()
    if device.type != "cuda" or choice not in installed():
        raise OptionError("ns_kernel", f"= {choice!r} needs CUDA and the package triton; install it or choose 'auto'")
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)[0]) not in CAPABILITIES:
        problem = f"needs a GPU of compute capability 9 or 10 (tensor memory accelerator), not {capability}"
        raise OptionError("ns_kernel", f"= {choice!r} {problem}; choose 'auto'")
    return tuple(Kernel(dtype, 1, choice, product=product_of(choice)) for dtype in HALVES)


def product_of(name: str) -> Product | None:
    """The product for `triton`, and None for `plain`."""
    if name == "plain":
        return None
    # On use, because only CUDA builds of PyTorch include Triton.
    from .symmetric import symmetric_product

    return symmetric_product


def installed() -> list[str]:
    """The kernels whose packages are installed."""
    return ["triton"] if any(distributions(name="triton")) else []
