"""What a state dict has of Muon's parameters, checked before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..options import HYPERPARAMETERS
from .groups import check_group
from .momentum import fits


@dataclass(frozen=True)
class SavedAverage:
    """A trained parameter with its momentum in a state dict, which has it under `key`."""

    key: Any
    param: Tensor
    average: Tensor


def saved_averages(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], current: Mapping[Tensor, Tensor]
) -> Iterator[SavedAverage]:
    """The momentum of each trained parameter of an optimizer's groups, which has it in `current` now.

    Raises ValueError for a state dict of another optimizer or of other parameters, and for a momentum that is missing
    or has another mesh or other placements than its parameter and the current one.
    """
    theirs = state_dict["param_groups"]
    if len(theirs) != len(groups):
        raise ValueError(f"the state dict has {len(theirs)} parameter groups, and this Muon {len(groups)}")
    for group, saved in zip(groups, theirs, strict=True):
        missing = [name for name in HYPERPARAMETERS if name not in saved]
        if missing:
            said = f"the state dict is of another optimizer: its groups have no {', '.join(missing)}"
            raise ValueError(f"{said}; add them to load its momentum")
        check_group({**saved, "param_names": group["param_names"]})
        names = group["param_names"]
        if saved.get("param_names", names) != names or len(saved["params"]) != len(names):
            raise ValueError(f"the state dict is of other parameters: {saved.get('param_names')}, not {names}")
        for fqn, parameter, key in zip(names, group["params"], saved["params"], strict=True):
            if not parameter.requires_grad:
                continue
            average = state_dict["state"].get(key, {}).get("momentum_buffer")
            if average is None or not fits(average, current[parameter], parameter):
                raise ValueError(
                    f"{fqn}: the state dict has no momentum with the parameter's mesh and placements; what another "
                    "layout or muon.state has saved is loaded with torch.distributed.checkpoint"
                )
            yield SavedAverage(key, parameter, average)
