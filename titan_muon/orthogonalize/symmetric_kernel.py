"""Triton kernels for products that are known to be symmetric: half of the squares are computed, the others mirrored.

Imported only where it is used: it needs Triton, which PyTorch brings along for CUDA. Under TRITON_INTERPRET=1 it runs
on the CPU, in float32 and float16 (the interpreter reads bfloat16 operands of a dot product as integers).
`benchmarks/compile_kernels.py` shows what each tile compiles to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .dispatch import KERNEL_SIDES


@dataclass(frozen=True)
class Tile:
    """How a GPU computes one program's part of a product: `side` rows by `wide` squares of `side` columns.

    Attributes:
        side: rows and columns of a square, which is what is stored and mirrored.
        wide: squares beside each other, of which one is stored at a time.
        depth: columns of A per turn of the loop.
        warps: warps that compute.
        stages: turns of the loop whose operands are in shared memory at once.
        tma: operands and results through tensor descriptors, which the tensor memory accelerator copies.
        specialized: one warp copies and one issues products while the others store.
    """

    side: int = 128
    wide: int = 1
    depth: int = 64
    warps: int = 8
    stages: int = 4
    tma: bool = False
    specialized: bool = False

    def programs(self, size: int) -> int:
        """How many compute one product of `size` rows."""
        blocks = -(-size // (self.side * self.wide))
        return self.wide * blocks * (blocks + 1) // 2


TILES: Mapping[int, tuple[Tile, ...]] = {
    # Ampere copies by cp.async to addresses that each thread computes; it has no tensor memory accelerator. Not with 4
    # warps, which would read less from shared memory: Triton 3.9 spills their registers where C is added.
    8: (Tile(stages=3),),
    # 128 x 256 reads a quarter less from L2 for each product than 128 x 128, and has the widest instruction. Not
    # specialized: Triton 3.7 and 3.9 drop that for Hopper without a word, or spill. Of 128 x 128 two fit an SM, and one
    # computes while the other stores.
    9: (Tile(wide=2, tma=True), Tile(warps=4, stages=3, tma=True)),
    # The same, and sums are in tensor memory: the warps that store them are others than those that compute.
    10: (Tile(wide=2, tma=True, specialized=True), Tile(warps=4, stages=3, tma=True)),
}
"""The tiles by major compute capability. All others have 8's, which needs 64 KiB of shared memory and nothing new."""
NARROW = 1.15
"""Time for a square of 128 x 128 over that of 128 x 256, not measured: tensor cores take 1, L2's bytes take 4/3."""


@triton.jit
def _place(number, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and first column, in squares, of a program."""
    # Programs are numbered along the rows of the lower triangle: row i has i + 1 blocks of WIDE x WIDE squares.
    block = number // WIDE
    i = ((tl.sqrt(8.0 * block.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be off by one either way.
    i = tl.where(i * (i + 1) // 2 > block, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= block, i + 1, i)
    j = block - i * (i + 1) // 2
    return i * WIDE + number % WIDE, j * WIDE


@triton.jit
def _symmetric(rounded, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A square on the diagonal with its lower triangle mirrored: no dot product sums (r, c) and (c, r) alike."""
    index = tl.arange(0, SIDE)
    return tl.where(index[:, None] >= index[None, :], rounded, tl.trans(rounded))


@triton.jit
def _diagonal(delta, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """delta I."""
    index = tl.arange(0, SIDE)
    return tl.where(index[:, None] == index[None, :], delta, 0.0)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    sums, c, d, batch, row, col, alpha, beta, delta, HAS_C: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Store one square and its mirror, unless it is above the diagonal."""
    result = alpha * sums
    if HAS_C:
        result += beta * c.load([batch, row * SIDE, col * SIDE]).reshape(SIDE, SIDE).to(tl.float32)
    # The mirror of what was rounded, and not sums of its own, whose order may differ: the iteration takes its matrices
    # for symmetric to the last bit.
    if row == col:
        rounded = _symmetric((result + _diagonal(delta, SIDE)).to(d.dtype), SIDE)
        d.store([batch, row * SIDE, col * SIDE], rounded.reshape(1, SIDE, SIDE))
    elif row > col:
        rounded = result.to(d.dtype)
        d.store([batch, row * SIDE, col * SIDE], rounded.reshape(1, SIDE, SIDE))
        d.store([batch, col * SIDE, row * SIDE], tl.trans(rounded).reshape(1, SIDE, SIDE))


@triton.jit
def by_descriptors(  # type: ignore[no-untyped-def]
    a, b, c, d, depth, alpha, beta, delta,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, HAS_C: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """For GPUs with a tensor memory accelerator, which fills with zeros what is outside of a matrix."""
    batch = tl.program_id(1)
    row, col = _place(tl.program_id(0), WIDE)
    sums = tl.zeros((SIDE, SIDE * WIDE), dtype=tl.float32)
    for start in tl.range(0, depth, DEPTH, warp_specialize=SPECIALIZED):
        # A descriptor's last stride is 1: other operands are described, and loaded, transposed.
        if A_TURNED:
            left = a.load([batch, start, row * SIDE]).reshape(DEPTH, SIDE).T
        else:
            left = a.load([batch, row * SIDE, start]).reshape(SIDE, DEPTH)
        if B_TURNED:
            right = b.load([batch, col * SIDE, start]).reshape(SIDE * WIDE, DEPTH).T
        else:
            right = b.load([batch, start, col * SIDE]).reshape(DEPTH, SIDE * WIDE)
        # Full float32 for float32 operands: TF32 would round them as float16 does.
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if WIDE == 1:
        _store(sums, c, d, batch, row, col, alpha, beta, delta, HAS_C, SIDE)
    else:
        # One square after the other: both at once, with their mirrors, do not fit the registers.
        first, second = tl.split(sums.reshape(SIDE, 2, SIDE).permute(0, 2, 1))
        _store(first, c, d, batch, row, col, alpha, beta, delta, HAS_C, SIDE)
        _store(second, c, d, batch, row, col + 1, alpha, beta, delta, HAS_C, SIDE)


@triton.jit
def by_pointers(  # type: ignore[no-untyped-def]
    a, b, c, d, size, depth, alpha, beta, delta,
    a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, d_batch, d_row,
    HAS_C: tl.constexpr, WHOLE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """For GPUs without one. WHOLE: tiles cover the matrices exactly, and nothing is masked."""
    row, col = _place(tl.program_id(0), 1)
    # In 64 bits: a stack of experts has more than 2³¹ elements. One matrix has not, and 64 bits would take registers.
    batch = tl.program_id(1).to(tl.int64)
    a += batch * a_batch
    b += batch * b_batch
    rows = row * SIDE + tl.arange(0, SIDE)
    cols = col * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, DEPTH)
    a_tile = a + rows[:, None] * a_row + inner[None, :] * a_col
    b_tile = b + inner[:, None] * b_row + cols[None, :] * b_col
    sums = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if WHOLE:
            left = tl.load(a_tile)
            right = tl.load(b_tile)
        else:
            there = start + inner < depth
            left = tl.load(a_tile, mask=(rows[:, None] < size) & there[None, :], other=0.0)
            right = tl.load(b_tile, mask=there[:, None] & (cols[None, :] < size), other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        a_tile += DEPTH * a_col
        b_tile += DEPTH * b_row

    inside = (rows[:, None] < size) & (cols[None, :] < size)
    result = alpha * sums
    if HAS_C:
        added = c + batch * c_batch + rows[:, None] * c_row + cols[None, :]
        result += beta * tl.load(added, mask=inside, other=0.0).to(tl.float32)
    d += batch * d_batch
    square = d + rows[:, None] * d_row + cols[None, :]
    if row == col:
        rounded = _symmetric((result + _diagonal(delta, SIDE)).to(d.dtype.element_ty), SIDE)
        tl.store(square, rounded, mask=inside)
    else:
        rounded = result.to(d.dtype.element_ty)
        tl.store(square, rounded, mask=inside)
        mirror = d + cols[:, None] * d_row + rows[None, :]
        tl.store(mirror, tl.trans(rounded), mask=(cols[:, None] < size) & (rows[None, :] < size))


@dataclass(frozen=True)
class Launch:
    """One product as a kernel's launch: `kernel[grid](*args, **options)`."""

    kernel: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]
    options: Mapping[str, Any]


def launch_of(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    delta: float = 0.0,
    tile: Tile,
) -> Launch:
    """The launch that fills `out` as `symmetric_product` says, for operands that the kernels take."""
    size, inner = a.shape[1:]
    added = out if c is None else c
    grid = (tile.programs(size), len(a))
    options = {"HAS_C": c is not None, "SIDE": tile.side, "DEPTH": tile.depth}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    assert tile.wide in ((1, 2) if tile.tma else (1,)), f"{tile}: one square, or two by descriptors"
    if not tile.tma:
        strides = (*a.stride(), *b.stride(), *added.stride()[:2], *out.stride()[:2])
        options["WHOLE"] = size % tile.side == 0 and inner % tile.depth == 0
        return Launch(by_pointers, grid, (a, b, added, out, size, inner, alpha, beta, delta, *strides), options)
    described = (
        _described(a, tile.side, tile.depth),
        _described(b, tile.depth, tile.side * tile.wide),
        _described(added, tile.side, tile.side),
        _described(out, tile.side, tile.side),
    )
    options |= {"A_TURNED": a.stride(2) != 1, "B_TURNED": b.stride(2) != 1}
    options |= {"WIDE": tile.wide, "SPECIALIZED": tile.specialized}
    return Launch(by_descriptors, grid, (*described, inner, alpha, beta, delta), options)


def _described(matrices: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Blocks of (1, rows, cols), transposed where the memory is."""
    if matrices.stride(2) != 1:
        return TensorDescriptor.from_tensor(matrices.mT, [1, cols, rows])
    return TensorDescriptor.from_tensor(matrices, [1, rows, cols])


def _is_aligned(matrices: Tensor) -> bool:
    """Whether rows or columns are in one piece, and the kernels can address them."""
    # The accelerator and 16-byte copies need it, and all that Triton knows of a number is whether 16 divides it: one
    # that it does not divide makes every copy one element wide.
    batch, *strides = matrices.stride()
    sides = matrices.shape[1:]
    numbers = (batch, max(strides), *sides, matrices.data_ptr())
    # Offsets within a matrix are 32-bit.
    last = sum((side - 1) * stride for side, stride in zip(sides, strides, strict=True))
    return min(strides) == 1 and last < 2**31 and all(number % KERNEL_SIDES == 0 for number in numbers)


def fastest(tiles: Sequence[Tile], size: int, count: int, processors: int) -> Tile:
    """The tile whose programs end first on so many streaming multiprocessors (SMs)."""

    # 4,096 rows are 272 programs of two squares each: on 132 SMs the last eight would take a third turn for themselves.
    def seconds(tile: Tile) -> float:
        turns = -(-tile.programs(size) * count // processors)
        return turns * (tile.wide if tile.wide > 1 else NARROW)

    return min(tiles, key=seconds)


def tile_on(device: torch.device, size: int, count: int) -> Tile:
    """The tile for `count` products of `size` rows on a device; under the interpreter that of GPUs without TMA."""
    if device.type != "cuda":
        return TILES[8][0]
    found = torch.cuda.get_device_properties(device)
    return fastest(TILES.get(found.major, TILES[8]), size, count, found.multi_processor_count)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    delta: float = 0.0,
    tile: Tile | None = None,
) -> None:
    """Fill out (count, m, m) with alpha A B + beta C + delta I, of which only the lower triangle is computed.

    a (count, m, k) and b (count, k, m) of one dtype, contiguous or transposed, with A B symmetric; c (count, m, m),
    contiguous and symmetric, or None; m and k multiples of 16. Sums are float32. `out` is contiguous and shares no
    memory with the others. `tile` is `tile_on`'s unless given. Raises ValueError for other shapes and strides.
    """
    count, size, inner = a.shape
    square = torch.Size((count, size, size))
    operands = [t for t in (a, b, c, out) if t is not None]
    if b.shape != (count, inner, size) or out.shape != square or (c is not None and c.shape != square):
        shapes = [tuple(t.shape) for t in operands]
        raise ValueError(f"A (count, m, k), B (count, k, m), C and out (count, m, m) are needed, not {shapes}")
    if not (all(map(_is_aligned, operands)) and all(t.stride(2) == 1 for t in operands[2:])):
        found = [(tuple(t.shape), t.stride()) for t in operands]
        raise ValueError(f"sides and strides must be multiples of {KERNEL_SIDES}, or 1 within a row, not {found}")
    chosen = tile_on(a.device, size, count) if tile is None else tile
    launch = launch_of(a, b, c, out, alpha=alpha, beta=beta, delta=delta, tile=chosen)
    launch.kernel[launch.grid](*launch.args, **launch.options)
