"""Detection of replicas among plain tensors, so that one rank can orthogonalize for all."""

# [Note: replicas of plain tensors]
# - Plain tensors of one name are replicas under DDP, but not in custom tensor parallelism, in expert parallelism and in
#   an ensemble. So ranks compare the values at construction, and train different tensors separately.
# - Replicas diverge later if gradients are not reduced. Each step compares gradient sizes in the collective for faults,
#   and after a difference the next step raises on all ranks.

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..tensors.storage import TrainedParam
from .agreement import Agreement

INTEGERS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32}

NO_SIZE = -(2**30)
"""Size of a missing gradient."""
UNIT = 2**16
"""Sizes are base-2 logarithms, times this factor."""
LARGEST = 1000
"""Logarithm of a non-finite norm."""
TOLERANCE = 2**6
"""Largest size difference from rounding: 0.07 %. Different data gives several per cent."""


def unequal_tensors(params: Sequence[TrainedParam], agreement: Agreement) -> frozenset[str]:
    """Names of plain tensors with unequal values on ranks; warns. Collective over the world."""
    plain = {trained.fqn: trained.param for trained in params if not isinstance(trained.param, DTensor)}
    own = agreement.differing({fqn: contents(param) for fqn, param in plain.items()}, missing=True)
    if own:
        warnings.warn(
            f"{', '.join(sorted(own)[:5])}: plain tensors whose values differ between ranks; each rank orthogonalizes "
            "its own. If the tensors should be replicas, build Muon after DistributedDataParallel has made them equal",
            stacklevel=5,
        )
    return own


def contents(tensor: Tensor) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype, and `bit_sum`."""
    return tuple(tensor.shape), str(tensor.dtype), int(bit_sum(tensor).item())


def bit_sum(tensor: Tensor) -> Tensor:
    """A weighted sum of the elements' bits, () int64, exact in any order. Any changed bit changes the sum."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.int64))
    # Row weights distinguish permutations of the rows. Odd weights lose no bit modulo 2^64.
    rows = bits.sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * rows.numel(), 2, device=rows.device).view(rows.shape)
    return (rows * weights).sum()


def sizes(grads: Sequence[Tensor]) -> Tensor:
    """(2, count) int32: scaled logarithms of the gradients' norms, and their negatives, for one maximum over ranks."""
    # Neighbouring bfloat16 norms differ by more than the tolerance.
    norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=torch.float32))
    logarithms = norms.log2().nan_to_num(LARGEST, LARGEST, -LARGEST).mul(UNIT).round().int()
    return torch.stack((logarithms, -logarithms))


def differ(largest: int, negative_smallest: int) -> bool:
    """Whether gradients differ, from the maximum over ranks of both rows of `sizes`."""
    return largest + negative_smallest > TOLERANCE
