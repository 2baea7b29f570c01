"""Triton kernels of Muon's element-wise arithmetic: one launch for all pieces of a bucket, each read and written once.

Imported on use, because only CUDA builds of PyTorch include Triton. The arithmetic is float32 with explicit fused
multiply-adds, and rounds where the operators of `engine/step/muon.py` round, so that every variant of a kernel and the
CPU give the same bits. See [Note: tables and the vector of a step].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .draws import FACTORS, wrapped
from .tables import EXCLUDED, MISSING

FIRST_FACTOR: tl.constexpr = tl.constexpr(wrapped(FACTORS[0]))
SECOND_FACTOR: tl.constexpr = tl.constexpr(wrapped(FACTORS[1]))
ROW_HEADER: tl.constexpr = tl.constexpr(6)
"""Words of a row before its tensors, see `Row.words`. Each tensor has four."""
NO_GRADIENT: tl.constexpr = tl.constexpr(MISSING)
STAYS: tl.constexpr = tl.constexpr(EXCLUDED)


def of_triton(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a launch with Triton's dtypes."""
    return {
        name: getattr(tl, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value
        for name, value in options.items()
    }


@triton.jit
def _lerp(start, end, weight):  # type: ignore[no-untyped-def]
    """As torch.lerp, exact at both ends."""
    change = end - start
    return tl.where(weight < 0.5, tl.fma(change, weight, start), tl.fma(-change, 1.0 - weight, end))


@triton.jit
def _piece(number, tiles, table, TENSORS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row of the table, the elements in row-major order, the mask and the columns."""
    words = table + tl.load(tiles + number).to(tl.int64) * (ROW_HEADER + 4 * TENSORS)
    index = (number - tl.load(words + 2).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    size, cols = tl.load(words).to(tl.int32), tl.load(words + 1).to(tl.int32)
    if ALIGNED:
        size, cols = tl.multiple_of(size, 16), tl.multiple_of(cols, 16)
    return words, index, index < size, cols


@triton.jit
def _pointers(words, place, vector, index, cols, DTYPE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to these elements of tensor number `place` of a row."""
    word = words + ROW_HEADER + 4 * place
    start = (tl.load(vector + tl.load(word)) + tl.load(word + 1)).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The hints let Triton access 16 bytes at once. A hint on an argument of a function is lost.
        start = tl.multiple_of(start, 16)
    if FLAT:
        return start + index
    row, col, stride = index // cols, index % cols, tl.load(word + 2)
    if ALIGNED:
        return start + row * tl.multiple_of(stride, 16) + col
    return start + row * stride + col * tl.load(word + 3)


@triton.jit
def _float(word):  # type: ignore[no-untyped-def]
    return tl.load(word).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16(wide, added):  # type: ignore[no-untyped-def]
    """The upper half of a float32 after an addition to the bits. NaN stays NaN."""
    bits = tl.where(wide == wide, wide.to(tl.int32, bitcast=True) + added, 0x7FC00000)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _rounded(wide, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round to the nearest, ties to even. By hand for bfloat16, because Triton's interpreter truncates."""
    if tl.bfloat16 == DTYPE:
        return _bfloat16(wide, 0x7FFF + ((wide.to(tl.int32, bitcast=True) >> 16) & 1))
    return wide.to(DTYPE)


@triton.jit
def advance(  # type: ignore[no-untyped-def]
    tiles, table, vector,
    MOMENTUM: tl.constexpr, GRAD: tl.constexpr, PACKED: tl.constexpr, PACKS: tl.constexpr, GATHERS: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`update_momentum` of muon.py: the momentum moves towards the gradient, and the packed tensor gets the blend.

    A row has momentum, gradient and packed tensor. A missing gradient packs NaN, so that the owner makes no update.
    GATHERS: `Algorithm.gather_kernel`. "copy" packs the gradient, without a momentum, and "signs" the blend's signs.
    """
    words, index, inside, cols = _piece(tl.program_id(0), tiles, table, 3, ALIGNED, BLOCK)
    numbers, flag = vector + tl.load(words + 3), tl.load(vector + tl.load(words + 4))
    grads = _pointers(words, 1, vector, index, cols, GRAD, FLAT, ALIGNED)
    present = (flag & NO_GRADIENT) == 0
    grad = tl.load(grads, mask=inside & present, other=float("nan")).to(tl.float32) * _float(vector + 1)
    grad = _rounded(grad, GRAD).to(tl.float32)
    blend = grad
    if GATHERS != "copy":
        momenta = _pointers(words, 0, vector, index, cols, MOMENTUM, FLAT, ALIGNED)
        before = tl.load(momenta, mask=inside).to(tl.float32)
        average = _lerp(before, grad, _float(numbers))
        # A skipped step changes nothing.
        average = tl.where(present & (tl.load(vector) == 0), average, before)
        kept = _rounded(average, MOMENTUM)
        tl.store(momenta, kept, mask=inside)
        if MOMENTUM == GRAD:
            # The blend has the dtype of both, and else the wider dtype.
            average = kept.to(tl.float32)
        blend = tl.where(tl.load(numbers + 2) != 0, _lerp(grad, average, _float(numbers + 1)), average)
        if MOMENTUM == GRAD:
            blend = _rounded(blend, GRAD).to(tl.float32)
    if PACKS:
        result = _rounded(tl.where(present, blend, float("nan")), PACKED)
        if GATHERS == "signs":
            wide = result.to(tl.float32)
            signs = tl.where(wide > 0, 1.0, tl.where(wide < 0, -1.0, 0.0))
            result = _rounded(tl.where(tl.abs(wide) < float("inf"), signs, float("nan")), PACKED)
        packed = _pointers(words, 2, vector, index, cols, PACKED, FLAT, ALIGNED)
        tl.store(packed, result, mask=inside)


@triton.jit
def update(  # type: ignore[no-untyped-def]
    tiles, table, vector,
    PARAM: tl.constexpr, UPDATE: tl.constexpr, CAUTIOUS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`MuonAlgorithm.add`: param <- factor param + rate update; if CAUTIOUS, param + factor param, + rate update.

    A row has parameter and update. CAUTIOUS: only where param * update >= 0. STOCHASTIC: see [Note: draws].
    """
    words, index, inside, cols = _piece(tl.program_id(0), tiles, table, 2, ALIGNED, BLOCK)
    numbers, flag = vector + tl.load(words + 3), tl.load(vector + tl.load(words + 4))
    params = _pointers(words, 0, vector, index, cols, PARAM, FLAT, ALIGNED)
    updates = _pointers(words, 1, vector, index, cols, UPDATE, FLAT, ALIGNED)
    param, change = tl.load(params, mask=inside).to(tl.float32), tl.load(updates, mask=inside).to(tl.float32)
    factor, rate = _float(numbers + 3), _float(numbers + 4)
    decayed = tl.where(param * change < 0, param, tl.fma(param, factor, param)) if CAUTIOUS else param * factor
    if not STOCHASTIC:
        decayed = _rounded(decayed, PARAM).to(tl.float32)
    # A skipped step changes nothing.
    stays = (tl.load(vector) != 0) | ((flag & STAYS) != 0)
    wide = tl.where(stays, param, tl.fma(change, rate, decayed))
    if STOCHASTIC:
        draw = (index + (tl.load(words + 5) + tl.load(numbers + 5)).to(tl.int32)) * FIRST_FACTOR
        draw = (draw ^ (draw >> 15)) * SECOND_FACTOR
        tl.store(params, _bfloat16(wide, (draw >> 16) & 0xFFFF), mask=inside)
    else:
        tl.store(params, _rounded(wide, PARAM), mask=inside)


@triton.jit
def norm_parts(  # type: ignore[no-untyped-def]
    tiles, table, vector, ends, parts,
    PIECE: tl.constexpr, PARTS: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`parts` (count, PARTS): sums of squares of each matrix. A program sums every PARTS-th tile, in order.

    A row has a piece of a matrix in a buffer, and its place in the stack. `ends` (count + 1,): the first tile of each
    matrix, and the last tile.
    """
    matrix = tl.program_id(1)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    first, last = tl.load(ends + matrix), tl.load(ends + matrix + 1)
    for number in range(first + tl.program_id(0), last, PARTS):
        words, index, inside, cols = _piece(number, tiles, table, 2, ALIGNED, BLOCK)
        pieces = _pointers(words, 0, vector, index, cols, PIECE, FLAT, ALIGNED)
        value = tl.load(pieces, mask=inside, other=0.0).to(tl.float32)
        sums = tl.fma(value, value, sums)
    tl.store(parts + matrix * PARTS + tl.program_id(0), tl.sum(sums))


@triton.jit
def normalize(  # type: ignore[no-untyped-def]
    tiles, table, vector, ends, parts, broken, eps, start,
    PIECE: tl.constexpr, X: tl.constexpr, ROUNDED: tl.constexpr, PARTS: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`normalized` of newton_schulz.py: x <- start piece / max(norm, eps), and zero for a matrix without an update.

    `broken` (count,): whether the norm is not finite. ROUNDED: norm and scale are bfloat16.
    """
    words, index, inside, cols = _piece(tl.program_id(0), tiles, table, 2, ALIGNED, BLOCK)
    matrix, flag = tl.load(words + 3), tl.load(vector + tl.load(words + 4))
    idle = (tl.load(vector) != 0) | ((flag & STAYS) != 0)
    norm = tl.sqrt_rn(tl.sum(tl.load(parts + matrix * PARTS + tl.arange(0, PARTS))))
    # False for NaN.
    finite = norm < float("inf")
    if ROUNDED:
        norm = _rounded(norm, tl.bfloat16).to(tl.float32)
        scale = _rounded(tl.div_rn(1.0, tl.maximum(norm, eps)), tl.bfloat16).to(tl.float32)
    else:
        scale = tl.div_rn(1.0, tl.maximum(norm, eps)) * start
    pieces = _pointers(words, 0, vector, index, cols, PIECE, FLAT, ALIGNED)
    value = tl.load(pieces, mask=inside).to(tl.float32) * scale
    value = tl.where((idle == 0) & finite, value, 0.0)
    places = _pointers(words, 1, vector, index, cols, X, FLAT, ALIGNED)
    tl.store(places, _rounded(value, X), mask=inside)
    is_first = tl.program_id(0) == tl.load(ends + matrix)
    tl.store(broken + matrix, ((idle == 0) & (finite == 0)).to(tl.int8), mask=is_first)


@triton.jit
def split(  # type: ignore[no-untyped-def]
    tiles, table, vector,
    PIECE: tl.constexpr, X: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write results to the pieces of a buffer, in its dtype. A row has a piece, and its place in the stack."""
    words, index, inside, cols = _piece(tl.program_id(0), tiles, table, 2, ALIGNED, BLOCK)
    places = _pointers(words, 1, vector, index, cols, X, FLAT, ALIGNED)
    value = tl.load(places, mask=inside).to(tl.float32)
    pieces = _pointers(words, 0, vector, index, cols, PIECE, FLAT, ALIGNED)
    tl.store(pieces, _rounded(value, PIECE), mask=inside)
