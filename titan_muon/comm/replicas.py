"""Plain tensors that every rank has: whether they are copies, so that one rank can do the work for all."""

# [Note: copies]
# - Nothing says of a plain tensor what the other ranks' ones are. Under DDP they are copies. Those of a tensor-parallel
#   module of its own making, of experts, or of an ensemble are not, although names and shapes are equal.
# - So ranks compare the values at construction. What differs anywhere is each rank's own, and stays so.
# - Equal values may part later: gradients that nobody reduced, or training that is local on purpose. Each step compares
#   the sizes of the gradients, with the faults that it tells of anyway, and the next one is an error on all ranks.

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..tensors.storage import TrainedParam
from .agreement import Agreement

INTEGERS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""A dtype of as many bytes as an element."""

NO_SIZE = -(2**30)
"""In place of a size, where there is no gradient."""
UNIT = 2**16
"""Sizes are logarithms to base 2 in parts of this."""
LARGEST = 1000
"""The logarithm in place of what is not finite; no float's is as large."""
TOLERANCE = 2**6
"""Difference of two sizes that rounding may make: 0.07 %. Gradients of other data differ by several per cent."""


def unequal_tensors(params: Sequence[TrainedParam], agreement: Agreement) -> frozenset[str]:
    """The plain tensors whose values are not the same on every rank of the world, which calls this together; warns."""
    plain = {each.fqn: each.param for each in params if not isinstance(each.param, DTensor)}
    own = frozenset(plain) - agreement.same_everywhere({fqn: contents(param) for fqn, param in plain.items()})
    if own:
        warnings.warn(
            f"{', '.join(sorted(own)[:5])}: plain tensors whose values differ between ranks; each rank orthogonalizes "
            "its own. If they are to be copies, build Muon after DistributedDataParallel has made them equal",
            stacklevel=5,
        )
    return own


def contents(tensor: Tensor) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype, and a sum of the elements' bits, which is exact in whatever order it is made."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.int64))
    # The rows with weights, since the same rows in another order are another tensor.
    rows = bits.sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * rows.numel(), 2, device=rows.device).view(rows.shape)
    return tuple(tensor.shape), str(tensor.dtype), int((rows * weights).sum().item())


def sizes(grads: Sequence[Tensor]) -> Tensor:
    """(2, count) int32: the logarithm of each gradient's norm in UNITs, and its negative, for a maximum over ranks."""
    # In float32, or the norms of bfloat16 would be apart by more than the tolerance as soon as they are not equal.
    norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=torch.float32))
    logarithms = norms.log2().nan_to_num(LARGEST, LARGEST, -LARGEST).mul(UNIT).round().int()
    return torch.stack((logarithms, -logarithms))


def differ(largest: int, negative_smallest: int) -> bool:
    """Whether copies' gradients differ, by the maximum over ranks of both rows of `sizes`."""
    return largest + negative_smallest > TOLERANCE
