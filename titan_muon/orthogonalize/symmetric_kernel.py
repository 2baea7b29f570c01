"""A Triton kernel for products that are known to be symmetric: half of the tiles are computed, the others mirrored.

Imported only where it is used: it needs Triton, which PyTorch brings along for CUDA. Under TRITON_INTERPRET=1 it runs
on the CPU, in float32 and float16 (the interpreter reads bfloat16 operands of a dot product as integers).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, DEPTH, WARPS, STAGES = 128, 64, 8, 3
"""Side of a tile, columns of A per turn, and how a tile is run: 2 x 3 x 16 KiB of shared memory in half precision."""


@triton.jit
def _symmetric_tiles(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, d_ptr, size, depth, alpha, beta, delta,
    a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col, d_batch, d_row, d_col,
    HAS_C: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # Programs are numbered along the rows of the lower triangle: row i has i + 1 tiles.
    number = tl.program_id(0)
    # Offsets in 64 bits: a stack of experts has more than 2³¹ elements.
    batch = tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be off by one either way.
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2

    rows = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    cols = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    inner = tl.arange(0, DEPTH).to(tl.int64)
    a_tile = a_ptr + batch * a_batch + rows[:, None] * a_row + inner[None, :] * a_col
    b_tile = b_ptr + batch * b_batch + inner[:, None] * b_row + cols[None, :] * b_col
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if WHOLE:
            left = tl.load(a_tile)
            right = tl.load(b_tile)
        else:
            there = start + inner < depth
            left = tl.load(a_tile, mask=(rows[:, None] < size) & there[None, :], other=0.0)
            right = tl.load(b_tile, mask=there[:, None] & (cols[None, :] < size), other=0.0)
        # Full float32 for float32 operands: TF32 would round them as float16 does.
        sums = tl.dot(left, right, sums, input_precision="ieee")
        a_tile += DEPTH * a_col
        b_tile += DEPTH * b_row

    inside = (rows[:, None] < size) & (cols[None, :] < size)
    result = alpha * sums
    if HAS_C:
        c_tile = c_ptr + batch * c_batch + rows[:, None] * c_row + cols[None, :] * c_col
        result += beta * tl.load(c_tile, mask=inside, other=0.0).to(tl.float32)
    result += tl.where(rows[:, None] == cols[None, :], delta, 0.0)
    rounded = result.to(d_ptr.dtype.element_ty)
    # The mirror of what was rounded, and not sums of its own, whose order may differ: the iteration takes its matrices
    # for symmetric to the last bit. A tile on the diagonal mirrors its own lower triangle, since no dot product
    # promises that (r, c) and (c, r) are summed alike.
    mirrored = tl.trans(rounded)
    if i == j:
        rounded = tl.where(rows[:, None] >= cols[None, :], rounded, mirrored)
    tl.store(d_ptr + batch * d_batch + rows[:, None] * d_row + cols[None, :] * d_col, rounded, mask=inside)
    if i != j:
        mirror = d_ptr + batch * d_batch + cols[:, None] * d_row + rows[None, :] * d_col
        tl.store(mirror, mirrored, mask=(cols[:, None] < size) & (rows[None, :] < size))


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    delta: float = 0.0,
    tile: int = TILE,
    depth: int = DEPTH,
) -> None:
    """Fill out (count, m, m) with alpha A B + beta C + delta I, of which only the lower triangle is computed.

    a (count, m, k) and b (count, k, m) of one dtype and any strides, with A B symmetric; c (count, m, m), symmetric, or
    None. Sums are float32. `out` must share no memory with the others. Raises ValueError for other shapes.
    """
    count, size, inner = a.shape
    square = torch.Size((count, size, size))
    if b.shape != (count, inner, size) or out.shape != square or (c is not None and c.shape != square):
        shapes = [tuple(t.shape) for t in (a, b, c, out) if t is not None]
        raise ValueError(f"A (count, m, k), B (count, k, m), C and out (count, m, m) are needed, not {shapes}")
    tiles = triton.cdiv(size, tile)
    added = out if c is None else c
    _symmetric_tiles[(tiles * (tiles + 1) // 2, count)](
        a, b, added, out, size, inner, alpha, beta, delta,
        *a.stride(), *b.stride(), *added.stride(), *out.stride(),
        HAS_C=c is not None, WHOLE=size % tile == 0 and inner % depth == 0, TILE=tile, DEPTH=depth,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
