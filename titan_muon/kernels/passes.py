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

from ..engine.step.rounding import FACTORS, wrapped
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
def _piece(tiles, table, WORDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row of the table, the elements in row-major order, the mask and the columns."""
    words = table + tl.load(tiles + tl.program_id(0)).to(tl.int64) * WORDS
    index = (tl.program_id(0) - tl.load(words + 2).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    size, cols = tl.load(words).to(tl.int32), tl.load(words + 1).to(tl.int32)
    if ALIGNED:
        size, cols = tl.multiple_of(size, 16), tl.multiple_of(cols, 16)
    return words, index, index < size, cols


@triton.jit
def _pointers(word, vector, index, cols, DTYPE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to these elements of the tensor at `word` of a row."""
    start = (tl.load(vector + tl.load(word)) + tl.load(word + 1)).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # Here, because a hint on an argument of a function is lost.
        start = tl.multiple_of(start, 16)
    if FLAT:
        return start + index
    row, col, stride = index // cols, index % cols, tl.load(word + 2)
    if ALIGNED:
        # The hints let Triton access 16 bytes at once.
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
    MOMENTUM: tl.constexpr, GRAD: tl.constexpr, PACKED: tl.constexpr, PACKS: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`update_momentum` of muon.py: the momentum moves towards the gradient, and the packed tensor gets the blend.

    A row has momentum, gradient and packed tensor. A missing gradient packs NaN, so that the owner makes no update.
    """
    words, index, inside, cols = _piece(tiles, table, ROW_HEADER + 12, ALIGNED, BLOCK)
    numbers, flag = vector + tl.load(words + 3), tl.load(vector + tl.load(words + 4))
    momenta = _pointers(words + ROW_HEADER, vector, index, cols, MOMENTUM, FLAT, ALIGNED)
    grads = _pointers(words + ROW_HEADER + 4, vector, index, cols, GRAD, FLAT, ALIGNED)
    present = (flag & NO_GRADIENT) == 0
    before = tl.load(momenta, mask=inside).to(tl.float32)
    grad = tl.load(grads, mask=inside & present, other=float("nan")).to(tl.float32) * _float(vector + 1)
    grad = _rounded(grad, GRAD).to(tl.float32)
    average = _lerp(before, grad, _float(numbers))
    # A skipped step changes nothing.
    average = tl.where(present & (tl.load(vector) == 0), average, before)
    kept = _rounded(average, MOMENTUM)
    tl.store(momenta, kept, mask=inside)
    if PACKS:
        if MOMENTUM == GRAD:
            # The blend has the dtype of both, and else the wider dtype.
            average = kept.to(tl.float32)
        blend = tl.where(tl.load(numbers + 2) != 0, _lerp(grad, average, _float(numbers + 1)), average)
        if MOMENTUM == GRAD:
            blend = _rounded(blend, GRAD).to(tl.float32)
        packed = _pointers(words + ROW_HEADER + 8, vector, index, cols, PACKED, FLAT, ALIGNED)
        tl.store(packed, _rounded(tl.where(present, blend, float("nan")), PACKED), mask=inside)


@triton.jit
def update(  # type: ignore[no-untyped-def]
    tiles, table, vector,
    PARAM: tl.constexpr, UPDATE: tl.constexpr, CAUTIOUS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`MuonAlgorithm.add`: param <- factor param + rate update; if CAUTIOUS, param + factor param, + rate update.

    A row has parameter and update. CAUTIOUS: only where param * update >= 0. STOCHASTIC: see [Note: draws].
    """
    words, index, inside, cols = _piece(tiles, table, ROW_HEADER + 8, ALIGNED, BLOCK)
    numbers, flag = vector + tl.load(words + 3), tl.load(vector + tl.load(words + 4))
    params = _pointers(words + ROW_HEADER, vector, index, cols, PARAM, FLAT, ALIGNED)
    updates = _pointers(words + ROW_HEADER + 4, vector, index, cols, UPDATE, FLAT, ALIGNED)
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
