"""Which algorithm orthogonalizes a matrix: the cheapest on its device whose numerics are safe for its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from titan_muon.options import Machine, OptionError, StepOptions, check
from titan_muon.plan.terms.machine import MACHINES, MachineRates, machine_of
from titan_muon.plan.terms.work import (
    TeamCost,
    gram_elements,
    gram_flops,
    sliced_elements,
    standard_elements,
    standard_flops,
    team_cost,
)

from .coefficients import Coefficients

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
GRAM_ASPECT = 1.5
"""Side ratio from which the Gram iteration saves products; near squares it is also less exact than the standard one."""
GRAM_ROWS = 32
"""Smaller side from which products take longer than launching them, of which the Gram iteration has more."""
UNBROKEN_ROWS, UNBROKEN_ASPECT, UNBROKEN_STEPS = 256, 4, 5
"""Where float32 needs no restart. Ten steps on a matrix of low rank overflow without one."""
SAME_RATE = 0.9
"""Part of bfloat16's rate from which float16 is as fast, and preferred: it is eight times as exact."""
KERNEL_SIDES = 16
"""What divides both sides of matrices whose products a kernel makes. Others are copied slowly, or not at all."""


BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Any of these makes a CPU's products of bfloat16 faster than those of float32: on x86 the first two, then on ARM."""


def cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


@dataclass(frozen=True)
class Kernel:
    """What makes symmetric products fastest in a dtype for matrices of at least `rows` rows on the smaller side."""

    dtype: str
    rows: int
    products: str


@dataclass(frozen=True)
class Method:
    """An algorithm with all that it depends on but the coefficients.

    Attributes:
        algorithm: `standard`, `gram` or `reference`.
        dtype: dtype of the iteration, a name in DTYPES.
        restarts: steps before which the Gram iteration begins anew.
        products: kernel of its symmetric products, `plain` or a name in `symmetric.KERNELS`.
        batch: most matrices at a time.
        reason: why `auto` chose it, or nothing.
        slices: ranks that orthogonalize a matrix together, each a slice of it.
    """

    algorithm: str
    dtype: str
    restarts: tuple[int, ...] = ()
    products: str = "plain"
    batch: int = 1
    reason: str = field(default="", compare=False)
    slices: int = 1

    def __str__(self) -> str:
        restarts = f" restart {','.join(map(str, self.restarts))}" if self.restarts else ""
        products = "" if self.products == "plain" else f" {self.products}"
        slices = f" in {self.slices} slices" if self.slices > 1 else ""
        return f"{self.algorithm} {self.dtype}{restarts}{products}{slices}"

    def flops(self, rows: int, cols: int, steps: Coefficients) -> int:
        """FLOPs of the products for one matrix, or for a slice of it, symmetric ones counted whole."""
        # The reference makes all three products even where c is 0.
        cubic = sum(c == 0 for _, _, c in steps) if self.algorithm != "reference" else 0
        if self.algorithm == "gram":
            return gram_flops(rows, cols, len(steps), len(self.restarts), cubic) // self.slices
        return standard_flops(rows, cols, len(steps), cubic) // self.slices

    def runs(self, steps: int) -> tuple[int, ...]:
        """How many steps there are from the beginning, or a restart, to the next; the standard iteration restarts in
        each step."""
        restarts = range(1, steps) if self.algorithm == "standard" else self.restarts
        return tuple(last - first for first, last in pairwise((0, *restarts, steps)))

    def team(self, rows: int, cols: int, steps: Coefficients) -> TeamCost | None:
        """What the owner of a slice exchanges with those of the others."""
        if self.slices == 1:
            return None
        return team_cost(min(rows, cols), self.slices, self.runs(len(steps)), DTYPES[self.dtype].itemsize)

    def work_bytes(self, rows: int, cols: int, device: str, out_bytes: int = 0) -> int:
        """Bytes that one matrix, or a slice of it, takes while it is orthogonalized, besides its input and the
        products' own scratch.

        `out_bytes` are of an element of what the result is written to, if it is: its memory serves as one X, though not
        for slices.
        """
        if self.slices > 1:
            iteration = sliced_elements(rows, cols, self.slices) * DTYPES[self.dtype].itemsize
            # The CPU normalizes by a float32 norm through copies in float32.
            return max(iteration, 10 * rows * cols // self.slices) if device == "cpu" else iteration
        elements = gram_elements if self.algorithm == "gram" else standard_elements
        itemsize = DTYPES[self.dtype].itemsize
        spared = rows * cols if self.algorithm != "reference" and out_bytes == itemsize else 0
        iteration = (elements(rows, cols) - spared) * itemsize
        if device != "cpu":
            return iteration
        # The CPU normalizes to float16 through two float32 copies, and from float32 to bfloat16 through one.
        return max(iteration, rows * cols * (10 if self.dtype == "float16" else 6 if out_bytes > itemsize else 0))


@dataclass(frozen=True)
class Dispatch:
    """What a user may choose about orthogonalization, on one type of device.

    Attributes:
        algorithm: option `orthogonalize`; `auto` takes the cheapest that is safe, for each shape.
        dtype: option `ns_dtype`; `auto` takes the fastest, and of equally fast ones the most exact.
        device: type of the device.
        cpu_bfloat16: whether a CPU has instructions for bfloat16; by default what this machine's has.
        kernels: symmetric products that were measured to be fastest on this GPU; plain ones otherwise.
        machine: the machine that the step is planned for; by default the machine of such a device. CPUs always take
            the entry of their own instructions, so that a plan for another machine computes the same bits.

    Raises OptionError for names that are unknown, and for combinations that are not safe.
    """

    algorithm: str = "auto"
    dtype: str = "auto"
    device: str = "cpu"
    kernels: tuple[Kernel, ...] = ()
    cpu_bfloat16: bool = field(default_factory=cpu_has_bfloat16)
    machine: MachineRates | None = None

    def __post_init__(self) -> None:
        check(StepOptions, {"orthogonalize": self.algorithm, "ns_dtype": self.dtype})
        if self.algorithm == "reference" and self.dtype not in ("auto", "bfloat16"):
            problem = "is torch.optim.Muon's arithmetic, which is bfloat16; choose 'standard' or 'auto'"
        elif self.algorithm == "gram" and self.dtype == "bfloat16":
            problem = "diverges in it; choose 'float16' or 'float32'"
        else:
            return
        raise OptionError("ns_dtype", f"= {self.dtype!r}: orthogonalize = {self.algorithm!r} {problem}")

    @classmethod
    def of(
        cls, options: StepOptions, device: str, kernels: tuple[Kernel, ...] = (), machine: MachineRates | None = None
    ) -> Dispatch:
        """The dispatch that the options of a Muon describe, on a type of device."""
        return cls(options.orthogonalize, options.ns_dtype, device, kernels, machine=machine)

    def choose(self, rows: int, cols: int, steps: Coefficients, slices: int = 1) -> Method:
        """The method for rows x cols matrices, the same on every rank, or for one of so many slices of them."""
        if slices > 1:
            assert self.algorithm != "reference", "torch.optim.Muon's bits are of whole matrices"
            # That for the whole, whose numerics a slice then has. Kernels make square products, and it has none.
            return replace(self.choose(rows, cols, steps), products="plain", batch=1, slices=slices)
        if self.algorithm == "reference":
            return Method("reference", "bfloat16")
        # By rates that are written down, and not by a timing: ranks would time differently, and plan different steps.
        found = self._candidates(rows, cols, len(steps))
        seconds = {method: self._seconds(method, rows, cols, steps) for method in found}
        best = min(found, key=lambda method: seconds[method])
        batch = max(1, self.rates.batch_bytes // best.work_bytes(rows, cols, self.device))
        products = self._products(best.dtype, rows, cols)
        return replace(best, products=products, batch=batch, reason=self._reason(best, seconds))

    @property
    def rates(self) -> MachineRates:
        """The machine whose rates choose the algorithm."""
        if self.device == "cpu":
            return MACHINES["cpu" if self.cpu_bfloat16 else "cpu_float32"]
        return machine_of(Machine(), self.device) if self.machine is None else self.machine

    def _candidates(self, rows: int, cols: int, steps: int) -> list[Method]:
        """What is safe; of equally fast ones the first is taken."""
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
        if self.algorithm == "standard":
            return standard
        if self.algorithm == "gram":
            return grams
        pays = small >= GRAM_ROWS and large >= GRAM_ASPECT * small
        return [*standard, *(grams if pays else ())]

    def _seconds(self, method: Method, rows: int, cols: int, steps: Coefficients) -> float:
        """Time by products or by passes over memory, whichever is longer, in a stack that fills the device."""
        m, n = sorted((rows, cols))
        if method.algorithm == "gram":
            runs = len(method.restarts) + 1
            elements = runs * (3 * m * n + 2 * m * m) + (4 * len(steps) - 3 * runs) * 4 * m * m
        else:
            elements = len(steps) * (4 * m * n + 5 * m * m)
        moved = elements * DTYPES[method.dtype].itemsize
        rates = self.rates
        return max(method.flops(rows, cols, steps) / rates.flops[method.dtype], moved / rates.memory)

    def _products(self, dtype: str, rows: int, cols: int) -> str:
        if rows % KERNEL_SIDES or cols % KERNEL_SIDES:
            return "plain"
        fitting = [kernel for kernel in self.kernels if kernel.dtype == dtype and kernel.rows <= min(rows, cols)]
        return max(fitting, key=lambda kernel: kernel.rows).products if fitting else "plain"

    def _reason(self, best: Method, seconds: Mapping[Method, float]) -> str:
        if len(seconds) == 1 and self.algorithm != "auto":
            return ""
        others = {str(method): time for method, time in seconds.items() if method != best}
        if not others:
            return f"alone safe on {self.rates.name} for this shape"
        name = min(others, key=lambda other: others[other])
        return f"{others[name] / seconds[best]:.2f} x as fast on {self.rates.name} as {name}"


def restarts(steps: int) -> tuple[int, ...]:
    """Steps before which the Gram iteration begins anew: every second one, and no run of one step at the end."""
    # Longer runs lose the small singular values to rounding: with the ten steps of DeepSeek-V4 a run of four has more
    # error in float16 than the standard iteration in bfloat16.
    return tuple(range(2, steps - 1, 2))
