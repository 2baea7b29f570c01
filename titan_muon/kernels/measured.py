"""Measured choices for types of GPUs: symmetric kernels and float16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from ..engine.orthogonalize.dispatch import HALVES, Kernel, Product
from ..options import OptionError

MEASURED = Path(__file__).with_name("measured.json")
"""Choices by the name of a GPU, from `make gpu`."""
CAPABILITIES = (9, 10)
"""Major compute capabilities with symmetric kernels."""


@dataclass(frozen=True)
class Choices:
    """Measured choices for a type of GPU, by default the choices without a measurement.

    Attributes:
        kernels: fields of `orthogonalize.Kernel`.
        float16: whether Newton-Schulz in float16 is as accurate as in bfloat16.
    """

    kernels: tuple[Mapping[str, Any], ...] = ()
    float16: bool = True


def choices_of(gpu: str, file: Path = MEASURED) -> Choices:
    """The choices for a GPU's name; "" for no GPU."""
    entry = json.loads(file.read_text(encoding="utf-8")).get(gpu, {})
    return Choices(tuple(entry.get("kernels", ())), entry.get("float16", True))


def kernels_for(choice: str, device: torch.device) -> tuple[Kernel, ...]:
    """The kernels for the option `ns_kernel`. Raises OptionError for a kernel without support."""
    if choice == "auto":
        entries = (entry for entry in measured_choices(device).kernels if entry["products"] in ("plain", *installed()))
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


def measured_choices(device: torch.device) -> Choices:
    """The choices for this machine's GPU; without a measurement for another device."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return choices_of(torch.cuda.get_device_name(device) if has_gpu else "")


def installed() -> list[str]:
    """The kernels whose packages are installed."""
    return ["triton"] if any(distributions(name="triton")) else []
