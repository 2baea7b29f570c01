"""Triton kernels of Muon's element-wise arithmetic: one launch for a list of tensors, each read and written once.

Imported on use, because only CUDA builds of PyTorch include Triton. The arithmetic is float32, with explicit fused
multiply-adds, so that every variant of a kernel gives the same bits. `kernels/fused.py` describes the tables.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..engine.step.rounding import FACTORS, wrapped

FIRST_FACTOR: tl.constexpr = tl.constexpr(wrapped(FACTORS[0]))
SECOND_FACTOR: tl.constexpr = tl.constexpr(wrapped(FACTORS[1]))


@triton.jit
def _lerp(start, end, weight, rest):  # type: ignore[no-untyped-def]
    """Like torch.lerp, exact at both ends. `rest`: 1 - weight, of the host."""
    change = end - start
    return tl.where(weight < 0.5, tl.fma(change, weight, start), tl.fma(-change, rest, end))


@triton.jit
def _elements(tiles, table, WORDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tensor, as a row of the table, the elements in row-major order, the mask and the columns."""
    tile = tiles + tl.program_id(0) * 2
    words = table + tl.load(tile) * WORDS
    index = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    size, cols = tl.load(words).to(tl.int32), tl.load(words + 1).to(tl.int32)
    if ALIGNED:
        size, cols = tl.multiple_of(size, 16), tl.multiple_of(cols, 16)
    return words, index, index < size, cols


@triton.jit
def _pointers(words, place, index, cols, DTYPE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to these elements of tensor number `place` of a row of the table."""
    word = words + 3 + 3 * place
    start = tl.load(word).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if FLAT:
        return start + index
    row, col, stride = index // cols, index % cols, tl.load(word + 1)
    if ALIGNED:
        # The hints let Triton access 16 bytes at once.
        return start + row * tl.multiple_of(stride, 16) + col
    return start + row * stride + col * tl.load(word + 2)


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
def momentum(  # type: ignore[no-untyped-def]
    tiles, table, weight, decay, skipped, inverse,
    MOMENTUM: tl.constexpr, GRAD: tl.constexpr, PACKED: tl.constexpr,
    PACKS: tl.constexpr, NESTEROV: tl.constexpr, SKIPS: tl.constexpr, SCALED: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`update_momentum` of muon.py: the average moves by `weight` towards the gradient, and `packed` gets the blend.

    SKIPS: if `skipped` points to True, averages stay. SCALED: `inverse` points to a factor on the gradients.
    """
    words, index, inside, cols = _elements(tiles, table, 12, ALIGNED, BLOCK)
    momenta = _pointers(words, 0, index, cols, MOMENTUM, FLAT, ALIGNED)
    grads = _pointers(words, 1, index, cols, GRAD, FLAT, ALIGNED)
    grad = tl.load(grads, mask=inside).to(tl.float32)
    average = tl.load(momenta, mask=inside).to(tl.float32)
    if SCALED:
        grad *= tl.load(inverse)
    if SKIPS:
        grad = tl.where(tl.load(skipped), average, grad)
    average = _lerp(average, grad, weight, decay)
    tl.store(momenta, _rounded(average, MOMENTUM), mask=inside)
    if PACKS:
        blend = _lerp(grad, average, decay, weight) if NESTEROV else average
        packed = _pointers(words, 2, index, cols, PACKED, FLAT, ALIGNED)
        tl.store(packed, _rounded(blend, PACKED), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def update(  # type: ignore[no-untyped-def]
    tiles, table, factor, rate, seed, skipped,
    PARAM: tl.constexpr, UPDATE: tl.constexpr,
    CAUTIOUS: tl.constexpr, STOCHASTIC: tl.constexpr, IN_MEMORY: tl.constexpr, SKIPS: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """param <- factor param + rate update; if CAUTIOUS, param + factor param where param * update >= 0, + rate update.

    IN_MEMORY: `factor` and `rate` are pointers. STOCHASTIC: see [Note: draws]. SKIPS: if `skipped` points to True,
    weights stay.
    """
    words, index, inside, cols = _elements(tiles, table, 9, ALIGNED, BLOCK)
    if IN_MEMORY:
        factor, rate = tl.load(factor).to(tl.float32), tl.load(rate).to(tl.float32)
    params = _pointers(words, 0, index, cols, PARAM, FLAT, ALIGNED)
    updates = _pointers(words, 1, index, cols, UPDATE, FLAT, ALIGNED)
    param, change = tl.load(params, mask=inside).to(tl.float32), tl.load(updates, mask=inside).to(tl.float32)
    kept = tl.where(param * change < 0, param, tl.fma(param, factor, param)) if CAUTIOUS else param * factor
    wide = tl.fma(change, rate, kept)
    if SKIPS:
        wide = tl.where(tl.load(skipped), param, wide)
    if STOCHASTIC:
        draw = (index + tl.load(words + 2).to(tl.int32) + seed) * FIRST_FACTOR
        draw = (draw ^ (draw >> 15)) * SECOND_FACTOR
        tl.store(params, _bfloat16(wide, (draw >> 16) & 0xFFFF), mask=inside)
    else:
        tl.store(params, _rounded(wide, PARAM), mask=inside)
