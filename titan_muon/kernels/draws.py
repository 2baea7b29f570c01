"""Random numbers that operators and kernels draw alike: a hash of counts."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

# Factors of Knuth's multiplicative hash and of MurmurHash3.
FACTORS = (0x9E3779B1, 0x85EBCA6B)
LOWER_HALF = 2**16 - 1


def hash_counts(counts: Tensor, spare: Tensor) -> Tensor:
    """Replace int32 counts by uniform numbers of 16 bits. `spare`: int32 memory of the same shape."""
    counts.mul_(wrapped(FACTORS[0]))
    torch.bitwise_right_shift(counts, 15, out=spare)
    counts.bitwise_xor_(spare).mul_(wrapped(FACTORS[1]))
    return counts.bitwise_right_shift_(16).bitwise_and_(LOWER_HALF)


def wrapped(number: int) -> int:
    """The number modulo 2**32 as an int32."""
    return (number + 2**31) % 2**32 - 2**31


def seed_of(step: int) -> int:
    """A number that each count of a step is moved by."""
    return zlib.crc32(str(step).encode()) >> 2
