"""Names of parameters without the segments that wrappers of modules add."""

from __future__ import annotations

WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Segments that torch.compile, activation checkpointing and FSDP add to a name, at any level."""

LOOKED_UP = ("*embed*", "*lm_head*", "output.weight")
"""Names of embeddings and output heads: their shapes are those of matrices, and Muon is not meant for them.

`output.weight` has no star before it, because hidden layers have projections called output too.
"""


def canonical_fqn(name: str) -> str:
    """A parameter's name as the unwrapped model gives it.

    Removes the segments in WRAPPERS, and the leading `module.` of DistributedDataParallel.
    """
    segments = [segment for segment in name.split(".") if segment not in WRAPPERS]
    if len(segments) > 2 and segments[0] == "module":
        del segments[0]
    return ".".join(segments)
