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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titan_muon.orthogonalize import DTYPES
from titan_muon.orthogonalize.symmetric import HALVES
from titan_muon.orthogonalize.symmetric_kernel import TILES, Launch, Tile, launch_of

REGISTERS, BLOCK_REGISTERS, TENSOR_COLUMNS = 255, 65_536, 512
"""Most registers per thread and per block, and columns of tensor memory, on all three architectures."""
VARIANTS = ("X Xᵀ", "X Xᵀ, X transposed", "polynomial")
"""Products of an iteration. The transposed operands and the addition of C change the code."""


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture. Limits from the CUDA C++ Programming Guide's table of specifications by compute capability.

    Attributes:
        capability: as in sm_90.
        instruction: tensor-core instruction in PTX.
        copies: PTX instruction of copies to shared memory; TMA's begin with cp.async.bulk.
        shared: most bytes of shared memory per block.
    """

    capability: int
    instruction: str
    copies: str
    shared: int


ARCHITECTURES = (
    Architecture(80, "mma.sync", "cp.async.cg.shared", 163 * 1024),
    Architecture(90, "wgmma.mma_async", "cp.async.bulk.tensor.3d.shared", 227 * 1024),
    Architecture(100, "tcgen05.mma", "cp.async.bulk.tensor.3d.shared", 227 * 1024),
)


@dataclass(frozen=True)
class Case:
    """A product as the launcher would compile it. `ragged`: sides are no multiples of the tiles."""

    target: Architecture
    variant: str
    dtype: str
    tile: Tile
    ragged: bool = False

    def launch(self) -> Launch:
        """Launch on tensors without memory: the launcher specializes for strides and alignment."""
        rows, cols = (4112, 8208) if self.ragged else (4096, 8192)

        def stack(*shape: int) -> torch.Tensor:
            return torch.empty(2, *shape, dtype=DTYPES[self.dtype], device="meta")

        if self.variant == "polynomial":
            return launch_of(*(stack(rows, rows) for _ in range(4)), alpha=2.0, beta=-5.0, delta=3.0, tile=self.tile)
        x = stack(rows, cols) if self.variant == "X Xᵀ" else stack(cols, rows).mT
        return launch_of(x, x.mT, None, stack(rows, rows), tile=self.tile)


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
        return [fault for fault, found in checks.items() if found]


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


def compiled(case: Case) -> Compiled:
    """Compile a case and parse the result."""
    launch = case.launch()
    with compiling_for(case.target) as log:
        launch.kernel.device_caches.pop(case.target.capability, None)
        binary = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    ptx, metadata = binary.asm["ptx"], binary.metadata
    # A warp-specialized kernel has one entry, and ptxas one line for it.
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    assert len(registers) == len(spills) == 1, f"ptxas -v was expected to report one kernel: {log.getvalue()!r}"
    return Compiled(
        case,
        tuple(sorted(set(re.findall(rf"{re.escape(case.target.instruction)}\.[\w.:]+", ptx)))),
        case.target.copies in ptx,
        "ttg.warp_specialize(" in binary.asm["ttgir"],
        32 * metadata.num_warps,
        int(registers[0]),
        max(int(count) for count in spills[0]),
        metadata.shared,
        metadata.tmem_size or 0,
    )


def cases() -> Iterator[Case]:
    """Every architecture with its tiles and products."""
    for target in ARCHITECTURES:
        for tile, variant, dtype in product(TILES[target.capability // 10], VARIANTS, HALVES):
            yield Case(target, variant, dtype, tile)
            if not tile.tma:
                # With descriptors, ragged sides do not change the code.
                yield Case(target, variant, dtype, tile, ragged=True)


def row(found: Compiled, verdict: str) -> str:
    """One line of the table."""
    case, tile = found.case, found.case.tile
    shape = f"{tile.side} x {tile.side * tile.wide} x {tile.depth}, {tile.stages} stages"
    dots = {match[0] for name in found.instructions if (match := re.search(r"m\d+n\d+k\d+|kind::\w+", name))}
    cells = (
        f"sm_{case.target.capability}",
        case.variant + (", ragged" if case.ragged else ""),
        case.dtype,
        shape,
        f"{case.target.instruction} {' '.join(sorted(dots))}" if dots else "none",
        f"{case.target.copies if found.copies else 'none'}{', specialized' if found.specialized else ''}",
        found.threads,
        found.registers,
        found.spilled,
        f"{found.shared:,} of {case.target.shared:,}",
        verdict,
    )
    return f"| {' | '.join(map(str, cells))} |"


HEADER = """| GPU | product | dtype | tile | tensor cores | copies | threads | registers | spilled | shared memory | |
|---|---|---|---|---|---|---:|---:|---:|---:|---|"""


def main() -> int:
    """Print the table and the faults."""
    wrong = 0
    print(f"triton {triton.__version__}, torch {torch.__version__}\n\n{HEADER}", flush=True)
    for case in cases():
        found = compiled(case)
        faults = found.faults()
        wrong += bool(faults)
        print(row(found, "; ".join(faults) or "fits"), flush=True)
    # Small, because the kernel never runs: the architecture's tiles would spill and take ptxas a minute.
    for target in ARCHITECTURES:
        small = Tile(side=64, depth=32, warps=4, stages=2, tma=TILES[target.capability // 10][0].tma)
        found = compiled(Case(target, "X Xᵀ", "float32", small))
        print(row(found, "never used: no tensor cores without TF32"), flush=True)
    if wrong:
        print(f"\nnot to be used as they are: {wrong}, see the last column", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
