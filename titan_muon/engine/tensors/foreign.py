"""Parameters that other frameworks shard, by their marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import CHUNKS, local

MARKS = ("megatron_fsdp_dist_index", "_mfsdp_parameter_group")
"""Attributes of a parameter of Megatron-FSDP, of the classic implementation and of the experimental one."""

NOT_FOLLOWED = (
    "Megatron-FSDP sharded this parameter, and its placements do not tell which rows are on which rank; call "
    "titan_muon.follow_megatron_fsdp(optimizer, model) before the first step, in place of fully_shard_optimizer"
)

FLEX_SHARD = ("_placements", "_global_shape")
"""Attributes of a parameter in a bucket of FlexShard (pytorch/torchtitan#3502), a plain tensor with a rank's part."""

IN_FLEX_SHARD = (
    "a bucket of FlexShard stores a part of this parameter as a plain tensor, which would be taken for a whole matrix; "
    "shard the model by fully_shard, with titan_muon.own for whole matrices on single ranks"
)


def of_megatron_fsdp(parameter: Tensor) -> str:
    """Why the place of a parameter's part is unknown, if Megatron-FSDP sharded the parameter; else empty."""
    # The mesh has the order of axes even where the parameter was copied.
    marked = isinstance(parameter, DTensor) and (
        any(hasattr(parameter, mark) for mark in MARKS) or hasattr(parameter.device_mesh, "_shard_order")
    )
    return NOT_FOLLOWED if marked and not hasattr(local(parameter), CHUNKS) else ""


def of_flex_shard(parameter: Tensor) -> str:
    """Why the place of a parameter's part is unknown, if FlexShard stores the parameter; else empty."""
    in_bucket = not isinstance(parameter, DTensor) and all(hasattr(parameter, name) for name in FLEX_SHARD)
    return IN_FLEX_SHARD if in_bucket else ""


READERS: Sequence[Callable[[Tensor], str]] = (of_flex_shard, of_megatron_fsdp)
"""One for each framework."""


def unsupported_reason(parameter: Tensor) -> str:
    """Why Muon cannot read the place of a parameter's part; empty if it can."""
    return next((reason for read in READERS if (reason := read(parameter))), "")
