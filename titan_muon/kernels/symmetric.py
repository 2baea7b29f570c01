"""Triton kernels for symmetric products: half of the squares are computed, the rest mirrored.

With TRITON_INTERPRET=1 the kernels run on the CPU, in float32 and float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """A program's part of a product: `side` rows by `wide` squares of `side` columns.

    Attributes:
        side: rows and columns of a square, the unit of storing and mirroring.
        depth: columns of A per iteration of the loop.
        warps: warps that compute.
        stages: loop iterations with operands in shared memory.
        specialized: separate warps to copy, to issue products and to store.
    """

    side: int = 128
    wide: int = 1
    depth: int = 64
    warps: int = 8
    stages: int = 4
    specialized: bool = False

    def programs(self, size: int) -> int:
        blocks = -(-size // (self.side * self.wide))
        return self.wide * blocks * (blocks + 1) // 2


TILES: Mapping[int, tuple[Tile, ...]] = {
    # 128 x 256 reads a quarter less from L2 per product than 128 x 128. Not specialized: Triton 3.7 and 3.9 ignore
    # specialization on Hopper, or spill. Two 128 x 128 tiles fit an SM, and overlap compute and stores.
    9: (Tile(wide=2), Tile(warps=4, stages=3)),
    # Likewise, with sums in tensor memory, stored by separate warps.
    10: (Tile(wide=2, specialized=True), Tile(warps=4, stages=3)),
}
"""Tiles by major compute capability, of GPUs with a tensor memory accelerator."""
NARROW = 1.15
"""Relative time of a 128 x 128 square to a 128 x 256 square, estimated: tensor cores give 1, L2 traffic 4/3."""


@triton.jit
def _place(number, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and first column, in squares, of a program."""
    # Along the rows of the lower triangle: row i has i + 1 blocks of WIDE x WIDE squares.
    block = number // WIDE
    i = ((tl.sqrt(8.0 * block.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # Correct the square root by one in either direction.
    i = tl.where(i * (i + 1) // 2 > block, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= block, i + 1, i)
    j = block - i * (i + 1) // 2
    return i * WIDE + number % WIDE, j * WIDE


@triton.jit
def _symmetric(rounded, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mirror the lower triangle, because dot products sum (r, c) and (c, r) differently."""
    index = tl.arange(0, SIDE)
    return tl.where(index[:, None] >= index[None, :], rounded, tl.trans(rounded))


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    sums, c, d, batch, row, col, alpha, beta, HAS_C: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    result = alpha * sums
    if HAS_C:
        result += beta * c.load([batch, row * SIDE, col * SIDE]).reshape(SIDE, SIDE).to(tl.float32)
    # A second sum could differ in order, and the iteration relies on symmetry to the last bit.
    rounded = result.to(d.dtype)
    if row == col:
        d.store([batch, row * SIDE, col * SIDE], _symmetric(rounded, SIDE).reshape(1, SIDE, SIDE))
    elif row > col:
        d.store([batch, row * SIDE, col * SIDE], rounded.reshape(1, SIDE, SIDE))
        d.store([batch, col * SIDE, row * SIDE], tl.trans(rounded).reshape(1, SIDE, SIDE))


@triton.jit
def by_descriptors(  # type: ignore[no-untyped-def]
    a, b, c, d, depth, alpha, beta,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, HAS_C: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Copies by the tensor memory accelerator fill with zeros outside of the matrix."""
    batch = tl.program_id(1)
    row, col = _place(tl.program_id(0), WIDE)
    sums = tl.zeros((SIDE, SIDE * WIDE), dtype=tl.float32)
    for start in tl.range(0, depth, DEPTH, warp_specialize=SPECIALIZED):
        # A descriptor's last stride must be 1, so transposed operands are loaded transposed.
        if A_TURNED:
            left = a.load([batch, start, row * SIDE]).reshape(DEPTH, SIDE).T
        else:
            left = a.load([batch, row * SIDE, start]).reshape(SIDE, DEPTH)
        if B_TURNED:
            right = b.load([batch, col * SIDE, start]).reshape(SIDE * WIDE, DEPTH).T
        else:
            right = b.load([batch, start, col * SIDE]).reshape(DEPTH, SIDE * WIDE)
        # Full float32 for float32 operands, because TF32 would round like float16.
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if WIDE == 1:
        _store(sums, c, d, batch, row, col, alpha, beta, HAS_C, SIDE)
    else:
        # Square by square, because both squares with their mirrors exceed the registers.
        first, second = tl.split(sums.reshape(SIDE, 2, SIDE).permute(0, 2, 1))
        _store(first, c, d, batch, row, col, alpha, beta, HAS_C, SIDE)
        _store(second, c, d, batch, row, col + 1, alpha, beta, HAS_C, SIDE)


def _described(matrices: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Blocks of (1, rows, cols), transposed for transposed memory."""
    if matrices.stride(2) != 1:
        return TensorDescriptor.from_tensor(matrices.mT, [1, cols, rows])
    return TensorDescriptor.from_tensor(matrices, [1, rows, cols])


def tile_on(device: torch.device, size: int, count: int) -> Tile:
    """The tile for `count` products of `size` rows: the fastest, by turns on the streaming multiprocessors (SMs)."""
    if device.type != "cuda":
        return TILES[9][1]
    gpu = torch.cuda.get_device_properties(device)

    def seconds(tile: Tile) -> float:
        turns = -(-tile.programs(size) * count // gpu.multi_processor_count)
        return turns * (tile.wide if tile.wide > 1 else NARROW)

    return min(TILES[gpu.major], key=seconds)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor,
    tile: Tile | None = None,
) -> partial[Any]:
    """The call that fills out (count, m, m) with alpha A B + beta C, computing only the lower triangle.

    a (count, m, k) and b (count, k, m) of equal dtype, contiguous or transposed, with symmetric A B; c (count, m, m),
    contiguous and symmetric, or None; m and k multiples of 16, as descriptors need. Sums are float32. `out` is
    contiguous and no operand. `tile` defaults to `tile_on`. The memory may move between calls.
    """
    count, size, inner = a.shape
    tile = tile_on(a.device, size, count) if tile is None else tile
    squares = [(out if c is None else c, tile.side, tile.side), (out, tile.side, tile.side)]
    blocks = [(a, tile.side, tile.depth), (b, tile.depth, tile.side * tile.wide), *squares]
    options: dict[str, Any] = {"A_TURNED": a.stride(2) != 1, "B_TURNED": b.stride(2) != 1, "HAS_C": c is not None}
    options |= {"SIDE": tile.side, "WIDE": tile.wide, "DEPTH": tile.depth, "SPECIALIZED": tile.specialized}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages, "grid": (tile.programs(size), count)}
    return partial(by_descriptors.run, *starmap(_described, blocks), inner, alpha, beta, warmup=False, **options)
