"""Names of parameters without the segments of module wrappers, and warnings at the user's line."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Segments of torch.compile, activation checkpointing and FSDP, at any level of a name."""


def unwrapped(name: str) -> str:
    """A parameter's name without WRAPPERS."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def canonical_fqn(name: str) -> str:
    """A parameter's name in the unwrapped model: without WRAPPERS and DistributedDataParallel's leading `module.`."""
    segments = unwrapped(name).split(".")
    if len(segments) > 2 and segments[0] == "module":
        del segments[0]
    return ".".join(segments)


def names_in(group: Mapping[str, Any]) -> Sequence[str]:
    """The names of a group's parameters, or numbers. Raises ValueError for another number of parameters."""
    params = group["params"]
    names: Sequence[str] = group.get("param_names") or [f"parameter {index}" for index in range(len(params))]
    if len(names) != len(params):
        raise ValueError(
            f"param_groups: the group of {names[0]} has {len(params)} parameters and {len(names)} names; freeze "
            "parameters (requires_grad = False) instead of removing them, or build a new optimizer. "
            "ZeroRedundancyOptimizer and DeepSpeed ZeRO cannot wrap Muon: shard the model by fully_shard (FSDP2), or "
            "keep each momentum on one rank by state = 'owner'"
        )
    return names


def named_parameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) pairs of an optimizer's groups. Raises ValueError for a group with another number of names."""
    for group in groups:
        yield from zip(names_in(group), group["params"], strict=True)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def family(fqn: str) -> str:
    """A parameter's name with * for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def families(fqns: Iterable[str], note: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first families of names, for a message. `note`: a text after a name."""
    return listed(list(dict.fromkeys(family(fqn) + note.get(fqn, "") for fqn in fqns)), 3)


INTERNAL = frozenset(("titan_muon", "torch", "contextlib"))
"""Packages between a warning and the code of the user."""


def warn(text: str) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in INTERNAL:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
