"""The method of orthogonalizing a matrix, by device and shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from ..engine.layout.work import CPU, CPU_FLOAT32, GPU, MethodRates
from ..engine.orthogonalize import DTYPES, Coefficients, Method, Product
from ..options import OptionError

LARGEST, DIVERGED = 4.0, 1e30
"""Limit of singular values during the iteration, and a value whose powers overflow."""
GRAM_ASPECT = 1.5
"""Least side ratio for the Gram iteration: near-square matrices save no products and lose accuracy."""
GRAM_ROWS = 32
"""Least side for the Gram iteration, which has more launches."""
UNBROKEN_ROWS, UNBROKEN_ASPECT, UNBROKEN_STEPS = 256, 4, 5
"""Limits of float32 without restarts: longer iterations on low-rank matrices overflow."""
SAME_RATE = 0.9
"""float16 is preferred at this share of bfloat16's rate, because of 8 times the precision."""
KERNEL_SIDES = 16
"""Divisor of both sides required by kernels; other sizes would need slow copies."""
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Capabilities for fast bfloat16 products: x86, then ARM."""
HALVES = ("float16", "bfloat16")
"""Dtypes with kernels. float32 without TF32 (TF32 rounds like float16) cannot use tensor cores."""
CAPABILITIES = (9, 10)
"""Major compute capabilities with symmetric kernels."""
MEASURED = Path(__file__).with_name("measured.json")
"""Kernels by the name of a GPU, by hand from `benchmarks/one_gpu/newton_schulz.py`."""


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


@dataclass(frozen=True)
class Kernel:
    """The fastest symmetric products of `count` matrices by dtype and smaller side. Without `product`: plain."""

    dtype: str
    rows: int
    products: str
    count: int = 1
    product: Product | None = field(default=None, compare=False, repr=False)


def measured_kernels(gpu: str, file: Path = MEASURED) -> list[dict[str, Any]]:
    """Fields of `Kernel` for a GPU's name; none without a measurement."""
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


@dataclass(frozen=True)
class Dispatch:
    """The options on a device type. Raises OptionError for unsafe combinations.

    Attributes:
        algorithm: `auto` takes the cheapest safe algorithm for each shape.
        dtype: `auto` takes the fastest, and among equally fast dtypes the most precise.
        kernels: symmetric products measured as fastest on this GPU; plain products otherwise.
        gpu: rates of the planned machine. CPUs have the rates of their instructions, so that a plan for a different
            machine computes the same bits.
    """

    algorithm: str = "auto"
    dtype: str = "auto"
    device: str = "cpu"
    kernels: tuple[Kernel, ...] = ()
    cpu_bfloat16: bool = field(default_factory=cpu_has_bfloat16)
    gpu: MethodRates = GPU

    def __post_init__(self) -> None:
        if self.algorithm == "reference" and self.dtype not in ("auto", "bfloat16"):
            problem = "is torch.optim.Muon's arithmetic, which is bfloat16; choose 'standard' or 'auto'"
        elif self.algorithm == "gram" and self.dtype == "bfloat16":
            problem = "diverges in it; choose 'float16' or 'float32'"
        else:
            return
        raise OptionError("ns_dtype", f"= {self.dtype!r}: orthogonalize = {self.algorithm!r} {problem}")

    def choose(self, rows: int, cols: int, steps: Coefficients) -> Method:
        """The method for a matrix. Raises OptionError as `with_margin`."""
        candidates = with_margin(self._candidates(rows, cols, len(steps)), steps)
        # Not by timing, because plans would differ between ranks.
        seconds = {method: self._seconds(method, rows, cols, steps) for method in candidates}
        best = min(candidates, key=lambda method: seconds[method])
        # On a GPU only the products of the reference go matrix by matrix, and larger buckets take fewer launches.
        alone = self.algorithm == "reference" and self.device == "cpu"
        batch = 1 if alone else max(1, self.rates.batch_bytes // best.work_bytes(rows, cols, self.device))
        best = replace(best, batch=batch, reason=self._reason(best, seconds))
        return best if self.algorithm == "reference" else self._with_kernel(best, rows, cols)

    @property
    def rates(self) -> MethodRates:
        if self.device == "cpu":
            return CPU if self.cpu_bfloat16 else CPU_FLOAT32
        return self.gpu

    def _candidates(self, rows: int, cols: int, steps: int) -> list[Method]:
        """Safe methods; among equally fast methods the first wins."""
        if self.algorithm == "reference":
            return [Method("reference", "bfloat16")]
        flops = self.rates.flops
        dtypes = sorted(DTYPES, key=lambda name: -flops[name]) if self.dtype == "auto" else [self.dtype]
        if self.dtype == "auto" and flops["float16"] >= SAME_RATE * flops["bfloat16"]:
            dtypes.remove("bfloat16")
        small, large = sorted((rows, cols))
        standard = [Method("standard", dtype) for dtype in dtypes]
        grams = [Method("gram", dtype, restarts(steps)) for dtype in dtypes if dtype != "bfloat16"]
        unbroken = small <= UNBROKEN_ROWS and large >= UNBROKEN_ASPECT * small and steps <= UNBROKEN_STEPS
        if "float32" in dtypes and unbroken:
            grams.append(Method("gram", "float32"))
        pays = small >= GRAM_ROWS and large >= GRAM_ASPECT * small
        return {"standard": standard, "gram": grams, "auto": standard + grams * pays}[self.algorithm]

    def _seconds(self, method: Method, rows: int, cols: int, steps: Coefficients) -> float:
        """Seconds of products or of memory passes, the longer of both, for a full batch."""
        m, n = sorted((rows, cols))
        if method.algorithm == "gram":
            runs = len(method.restarts) + 1
            elements = runs * (3 * m * n + 2 * m * m) + (4 * len(steps) - 3 * runs) * 4 * m * m
        else:
            elements = len(steps) * (4 * m * n + 5 * m * m)
        moved = elements * DTYPES[method.dtype].itemsize
        rates = self.rates
        return max(method.flops(rows, cols, steps) / rates.flops[method.dtype], moved / rates.memory)

    def _with_kernel(self, method: Method, rows: int, cols: int) -> Method:
        """The method with the kernel that is fastest from some count of matrices on."""
        side = min(rows, cols)
        fitting = [kernel for kernel in self.kernels if kernel.dtype == method.dtype and kernel.rows <= side]
        if rows % KERNEL_SIDES or cols % KERNEL_SIDES:
            return method
        for fewest in sorted({kernel.count for kernel in fitting}, reverse=True):
            # The measurement with most elements in at most as many matrices.
            measured = (kernel for kernel in fitting if kernel.count <= fewest)
            best = max(measured, key=lambda kernel: kernel.count * kernel.rows**2)
            if best.products == "plain":
                break
            method = replace(method, products=best.products, product=best.product, fewest=fewest)
        return method

    def _reason(self, best: Method, seconds: Mapping[Method, float]) -> str:
        if len(seconds) == 1 and self.algorithm != "auto":
            return ""
        rest = {str(method): time for method, time in seconds.items() if method != best}
        if not rest:
            return f"alone safe on {self.rates.name} for this shape"
        name = min(rest, key=lambda method: rest[method])
        return f"{rest[name] / seconds[best]:.2f} x as fast on {self.rates.name} as {name}"


def with_margin(methods: Sequence[Method], steps: Coefficients) -> list[Method]:
    """The methods whose rounding keeps the steps from diverging. Raises OptionError if there are none."""
    safe = [method for method in methods if has_margin(steps, torch.finfo(DTYPES[method.dtype]).eps)]
    if not safe:
        # A remedy must help the most precise method.
        dtype = min((method.dtype for method in methods), key=lambda name: torch.finfo(DTYPES[name]).eps)
        other = "choose a named set" if dtype == "float32" else "compute in float32 (ns_dtype) by 'standard'"
        raise OptionError(
            "ns_coefficients",
            f"has no margin for rounding in {dtype}: singular values grow above {LARGEST:g}, and diverge; divide the "
            f"(a, b, c) of every step except the last by (s, s**3, s**5) with s = 1.02, or {other}",
        )
    return safe


def restarts(steps: int) -> tuple[int, ...]:
    """The Gram iteration restarts before every second step, without a last run of a single step."""
    # Longer runs lose small singular values: with DeepSeek-V4's ten steps, runs of four in float16 have more error than
    # the standard iteration in bfloat16.
    return tuple(range(2, steps - 1, 2))


def has_margin(steps: Coefficients, rounding: float) -> bool:
    """Whether singular values up to 1 stay below LARGEST if each step gets them larger by a factor 1 + `rounding`."""
    return max(largest_values(steps, 1.0, rounding)) < LARGEST


@cache
def largest_values(steps: Coefficients, largest: float, rounding: float = 0.0) -> tuple[float, ...]:
    """The largest singular value after each step, for values from 0 to `largest` before."""
    after = list[float]()
    for a, b, c in steps:
        largest *= 1 + rounding
        if largest > DIVERGED:
            return (*after, math.inf)
        # A polynomial is largest at the end of the interval, or where its derivative a + 3 b x^2 + 5 c x^4 is 0.
        squares = [largest**2, *_roots(5 * c, 3 * b, a)]
        largest = max(math.sqrt(x) * abs(a + x * (b + c * x)) for x in squares if 0 <= x <= largest**2)
        after.append(largest)
    return tuple(after)


def _roots(a: float, b: float, c: float) -> tuple[float, ...]:
    """The real roots of a x^2 + b x + c."""
    if a == 0:
        return () if b == 0 else (-c / b,)
    square = b * b - 4 * a * c
    return () if square < 0 else tuple((-b + sign * math.sqrt(square)) / (2 * a) for sign in (1, -1))
