"""The Triton kernels compiled without a GPU, as a table: instructions, registers, spills, shared memory.

    PYTHONPATH=.cache/triton python benchmarks/compile_kernels.py    # or: make kernels

Exits with 1 if a kernel lacks the architecture's instruction, spills, or exceeds a limit. All figures come from the
compiler: PTX, the log of `ptxas -v`, and Triton's metadata.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titan_muon.engine.orthogonalize import DTYPES
from titan_muon.kernels.batches import PARTS, TableLaunch
from titan_muon.kernels.dispatch import HALVES
from titan_muon.kernels.symmetric import TILES, Tile, symmetric_product
from titan_muon.kernels.tables import Table

REGISTERS, BLOCK_REGISTERS, TENSOR_COLUMNS = 255, 65_536, 512
"""Most registers per thread and per block, and columns of tensor memory, on all three architectures."""
VECTOR = "v4.b32"
"""Accesses of 16 bytes, in PTX."""
PASS_REGISTERS = 32_768
"""Most registers per block of a pass, so that an SM holds at least two blocks."""
VARIANTS = ("X Xᵀ", "X Xᵀ, X transposed", "polynomial")
"""Products of an iteration. The transposed operands and the addition of C change the code."""


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture. Limits from the CUDA C++ Programming Guide's table of specifications by compute capability.

    Attributes:
        capability: as in sm_90.
        instruction: tensor-core instruction in PTX; empty without products.
        copies: PTX instruction of copies to shared memory by TMA.
        shared: most bytes of shared memory per block.
    """

    capability: int
    instruction: str
    copies: str
    shared: int


ARCHITECTURES = (
    Architecture(80, "", "", 163 * 1024),
    Architecture(90, "wgmma.mma_async", "cp.async.bulk.tensor.3d.shared", 227 * 1024),
    Architecture(100, "tcgen05.mma", "cp.async.bulk.tensor.3d.shared", 227 * 1024),
)


@dataclass(frozen=True)
class Case:
    """A product as the launcher would compile it."""

    target: Architecture
    variant: str
    dtype: str
    tile: Tile

    def launch(self) -> partial[Any]:
        """Launch on tensors without memory: the launcher specializes for strides and alignment."""
        rows, cols = 4096, 8192

        def stack(*shape: int) -> torch.Tensor:
            return torch.empty(2, *shape, dtype=DTYPES[self.dtype], device="meta")

        if self.variant == "polynomial":
            a, b, c, out = (stack(rows, rows) for _ in range(4))
            return symmetric_product(a, b, c, alpha=2.0, beta=-5.0, out=out, tile=self.tile)
        x = stack(rows, cols) if self.variant == "X Xᵀ" else stack(cols, rows).mT
        return symmetric_product(x, x.mT, out=stack(rows, rows), tile=self.tile)


@dataclass(frozen=True)
class Compiled:
    """Compiled form of a case.

    Attributes:
        instructions: tensor-core instructions in the PTX, with their shapes.
        copies: whether the PTX has the architecture's copies to shared memory.
        specialized: whether warps have different programs.
        threads: per block, with the warps added by specialization.
        registers: per thread.
        spilled: bytes per thread of register spills.
        shared: bytes of shared memory per block.
        columns: columns of tensor memory.
    """

    case: Case
    instructions: tuple[str, ...]
    copies: bool
    specialized: bool
    threads: int
    registers: int
    spilled: int
    shared: int
    columns: int

    def faults(self) -> list[str]:
        """Reasons to reject the kernel."""
        target, tile = self.case.target, self.case.tile
        checks = {
            f"no {target.instruction}": not self.instructions,
            f"no {target.copies}": not self.copies,
            "warps are not specialized": tile.specialized and not self.specialized,
            f"{self.spilled} bytes spilled": self.spilled > 0,
            f"{self.registers} registers": self.registers > REGISTERS,
            f"{self.registers} registers x {self.threads} threads": self.registers * self.threads > BLOCK_REGISTERS,
            f"{self.shared:,} bytes of shared memory of {target.shared:,}": self.shared > target.shared,
            f"{self.columns} columns of tensor memory": self.columns > TENSOR_COLUMNS,
        }
        return [fault for fault, is_fault in checks.items() if is_fault]


@contextlib.contextmanager
def compiling_for(target: Architecture) -> Iterator[io.StringIO]:
    """Let Triton compile for an absent GPU, without its cache; yields ptxas's output."""
    absent: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target.capability, 32),
        get_current_device=lambda: target.capability,
        get_current_stream=lambda device: 0,
    )
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        # ptxas prints only when it runs.
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        driver.set_active(absent)
        try:
            yield log
        finally:
            # Reset, so that the next user of Triton gets the real GPU.
            driver.set_active(None)


class Binary(NamedTuple):
    """A compiled kernel, with registers and spilled bytes per thread."""

    asm: Any
    metadata: Any
    registers: int
    spilled: int


def binary_of(launch: partial[Any], target: Architecture) -> Binary:
    """Compile the kernel of a launch."""
    with compiling_for(target) as log:
        launch.func.__self__.device_caches.pop(target.capability, None)  # type: ignore[attr-defined]
        binary = launch(warmup=True)
    # A warp-specialized kernel has one entry, and ptxas one line for it.
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    assert len(registers) == len(spills) == 1, f"ptxas -v was expected to report one kernel: {log.getvalue()!r}"
    return Binary(binary.asm, binary.metadata, int(registers[0]), max(int(count) for count in spills[0]))


def compiled(case: Case) -> Compiled:
    """Compile a case and parse the result."""
    binary = binary_of(case.launch(), case.target)
    ptx, metadata = binary.asm["ptx"], binary.metadata
    return Compiled(
        case,
        tuple(sorted(set(re.findall(rf"{re.escape(case.target.instruction)}\.[\w.:]+", ptx)))),
        case.target.copies in ptx,
        "ttg.warp_specialize(" in binary.asm["ttgir"],
        32 * metadata.num_warps,
        binary.registers,
        binary.spilled,
        metadata.shared,
        metadata.tmem_size or 0,
    )


def cases() -> Iterator[Case]:
    """Every architecture that has tiles, with its products."""
    for target in ARCHITECTURES:
        for tile, variant, dtype in product(TILES.get(target.capability // 10, ()), VARIANTS, HALVES):
            yield Case(target, variant, dtype, tile)


def row(kernel: Compiled, verdict: str) -> str:
    """One line of the table."""
    case, tile = kernel.case, kernel.case.tile
    shape = f"{tile.side} x {tile.side * tile.wide} x {tile.depth}, {tile.stages} stages"
    dots = {match[0] for name in kernel.instructions if (match := re.search(r"m\d+n\d+k\d+|kind::\w+", name))}
    cells = (
        f"sm_{case.target.capability}",
        case.variant,
        case.dtype,
        shape,
        f"{case.target.instruction} {' '.join(sorted(dots))}" if dots else "none",
        f"{case.target.copies if kernel.copies else 'none'}{', specialized' if kernel.specialized else ''}",
        kernel.threads,
        kernel.registers,
        kernel.spilled,
        f"{kernel.shared:,} of {case.target.shared:,}",
        verdict,
    )
    return f"| {' | '.join(map(str, cells))} |"


OPERANDS = {
    "advance": ("MOMENTUM", "GRAD", "PACKED"),
    "update": ("PARAM", "UPDATE"),
    "norm_parts": ("PIECE",),
    "normalize": ("PIECE", "X"),
    "split": ("PIECE", "X"),
}
"""Dtypes of the tensors of a kernel."""
OF_MATRICES = {"norm_parts": {"ld.global.b32", "st.global.b32"}, "normalize": {"ld.global.b32", "st.global.b8"}}
"""Accesses of tiles, sums and flags of matrices. Elements of 16 bits have others."""


@dataclass(frozen=True)
class PassCase:
    """A kernel of `muon.expert.fused` as the launcher would compile it.

    Attributes:
        kernel: `momentum` or `update`.
        dtypes: of the tensors: averages, gradients and packed, or weights and updates.
        flat, aligned: see `Table`.
        cautious: `update` alone, where bfloat16 weights are rounded stochastically.
        gathers: `advance` alone.
    """

    target: Architecture
    kernel: str
    dtypes: tuple[str, ...]
    flat: bool = True
    aligned: bool = True
    cautious: bool = False
    gathers: str = "momentum"

    def launch(self) -> partial[Any]:
        words, tiles = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
        dtypes = [getattr(torch, name) for name in self.dtypes]
        options: dict[str, Any] = dict(zip(OPERANDS[self.kernel], dtypes, strict=True))
        float32 = torch.empty(1, device="meta")
        more: tuple[Any, ...] = ()
        if self.kernel == "advance":
            options |= {"PACKS": True, "GATHERS": self.gathers}
        elif self.kernel == "update":
            options |= {"CAUTIOUS": self.cautious, "STOCHASTIC": self.dtypes[0] == "bfloat16"}
        elif self.kernel == "norm_parts":
            options, more = options | {"PARTS": PARTS}, (tiles, float32)
        elif self.kernel == "normalize":
            options |= {"PARTS": PARTS, "ROUNDED": self.dtypes[0] == self.dtypes[1]}
            more = (tiles, float32, torch.empty(1, dtype=torch.int8, device="meta"), 1e-14, 64.0)
        table = Table(tiles, words, (), self.flat, self.aligned)
        return TableLaunch(self.kernel, table, options, tuple(more)).prepared(words, aligned=self.aligned)


@dataclass(frozen=True)
class CompiledPass:
    """Compiled form of a pass.

    Attributes:
        accesses: instructions in the PTX for elements in global memory, by name, without those of the tables.
        local: whether the PTX has accesses to local memory.
    """

    case: PassCase
    accesses: tuple[str, ...]
    local: bool
    threads: int
    registers: int
    spilled: int
    shared: int

    def faults(self) -> list[str]:
        """Reasons to reject the kernel."""
        narrow = [name for name in self.accesses if VECTOR not in name]
        checks = {
            f"{', '.join(narrow)}, and not {VECTOR}": self.case.aligned and bool(narrow),
            f"{self.spilled} bytes spilled": self.spilled > 0,
            "local memory": self.local,
            f"{self.registers} registers": self.registers > PASS_REGISTERS // self.threads,
        }
        return [fault for fault, is_fault in checks.items() if is_fault]


def compiled_pass(case: PassCase) -> CompiledPass:
    """Compile a pass and parse the result."""
    binary = binary_of(case.launch(), case.target)
    ptx = binary.asm["ptx"]
    names = Counter(re.findall(r"\b((?:ld|st)\.(?:global|local)[\w.]*)", ptx))
    # A program reads 64-bit words and a 32-bit number of tables.
    elements = {name for name, count in names.items() if "b64" not in name and (name, count) != ("ld.global.b32", 1)}
    elements -= OF_MATRICES.get(case.kernel, set())
    threads = 32 * binary.metadata.num_warps
    return CompiledPass(
        case,
        tuple(sorted(elements)),
        any(".local" in name for name in names),
        threads,
        binary.registers,
        binary.spilled,
        binary.metadata.shared,
    )


def pass_cases() -> Iterator[PassCase]:
    """Every architecture with the dtypes and layouts of the kernels."""
    layouts = ((True, True), (False, True), (True, False), (False, False))
    for target, (flat, aligned) in product(ARCHITECTURES, layouts):
        for state, grad in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
            yield PassCase(target, "advance", (state, grad, "bfloat16"), flat, aligned)
        for gathers, wire in (("signs", "bfloat16"), ("copy", "float32")):
            yield PassCase(target, "advance", ("float32", "float32", wire), flat, aligned, gathers=gathers)
        for weight, cautious in product(("float32", "bfloat16"), (False, True)):
            yield PassCase(target, "update", (weight, "bfloat16"), flat, aligned, cautious)
        yield PassCase(target, "norm_parts", ("bfloat16",), flat, aligned)
        for kernel, x in product(("normalize", "split"), ("float16", "bfloat16")):
            yield PassCase(target, kernel, ("bfloat16", x), flat, aligned)


HEADER = """| GPU | product | dtype | tile | tensor cores | copies | threads | registers | spilled | shared memory | |
|---|---|---|---|---|---|---:|---:|---:|---:|---|"""


PASS_HEADER = """| GPU | pass | dtypes | tensors | accesses | threads | registers | spilled | shared memory | |
|---|---|---|---|---|---:|---:|---:|---:|---|"""


def pass_row(kernel: CompiledPass, verdict: str) -> str:
    """One line of the table."""
    case = kernel.case
    layout = f"{'contiguous' if case.flat else 'rows with strides'}, {'16' if case.aligned else 'any'} elements"
    name = f"{case.kernel}{', cautious' if case.cautious else ''}"
    cells = (
        f"sm_{case.target.capability}", name, ", ".join(case.dtypes), layout, ", ".join(kernel.accesses),
        kernel.threads, kernel.registers, kernel.spilled, f"{kernel.shared:,}", verdict,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Print the table and the faults."""
    wrong = 0
    print(f"triton {triton.__version__}, torch {torch.__version__}\n\n{HEADER}", flush=True)
    for case in cases():
        kernel = compiled(case)
        faults = kernel.faults()
        wrong += bool(faults)
        print(row(kernel, "; ".join(faults) or "fits"), flush=True)
    # Small, because the kernel never runs: the architecture's tiles would spill and take ptxas a minute.
    for target in (gpu for gpu in ARCHITECTURES if gpu.capability // 10 in TILES):
        kernel = compiled(Case(target, "X Xᵀ", "float32", Tile(side=64, depth=32, warps=4, stages=2)))
        print(row(kernel, "never used: no tensor cores without TF32"), flush=True)
    print(f"\n{PASS_HEADER}", flush=True)
    for pass_case in pass_cases():
        pass_kernel = compiled_pass(pass_case)
        faults = pass_kernel.faults()
        wrong += bool(faults)
        print(pass_row(pass_kernel, "; ".join(faults) or "fits"), flush=True)
    if wrong:
        print(f"\nnot to be used as they are: {wrong}, see the last column", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
