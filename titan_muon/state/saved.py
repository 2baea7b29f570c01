"""Checks of the momentum in a state dict before loading."""

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
    """A trained parameter, and the momentum under `key` in a state dict."""

    key: Any
    param: Tensor
    average: Tensor


def saved_averages(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], current: Mapping[Tensor, Tensor]
) -> Iterator[SavedAverage]:
    """The saved momentum of each trained parameter. `current` is the optimizer's momentum by parameter.

    Raises ValueError for a state dict of different parameters or of an optimizer with different hyperparameters, and
    for a momentum that is missing or fits neither the current momentum nor the parameter.
    """
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, and this Muon {len(groups)}")
    for group, saved in zip(groups, saved_groups, strict=True):
        missing = [name for name in HYPERPARAMETERS if name not in saved]
        if missing:
            problem = f"the state dict is of another optimizer: its groups have no {', '.join(missing)}"
            raise ValueError(f"{problem}; add these keys to load the momentum")
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
                    f"{fqn}: the state dict has no momentum with the parameter's mesh and placements; load the "
                    "state of another layout or muon.state with torch.distributed.checkpoint"
                )
            yield SavedAverage(key, parameter, average)
