"""Checks of parameter groups, and the Newton-Schulz iteration of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..options import Hyperparameters, MuonOptions, check
from ..orthogonalize import Iteration, iteration
from .host import resolved


def iteration_of(group: Mapping[str, Any]) -> Iteration:
    """The Newton-Schulz iteration of a parameter group. Raises ValueError for invalid coefficients."""
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def iteration_changed(group: Mapping[str, Any], planned: Iteration) -> bool:
    """Whether a group's Newton-Schulz iteration differs from the planned iteration."""
    try:
        return iteration_of(group) != planned
    except ValueError:
        return True


def checked(groups: Sequence[Mapping[str, Any]], options: MuonOptions) -> MuonOptions:
    """The options, with the `offload` of these groups' parameters. Raises ValueError as `check_group`."""
    for group in groups:
        check_group(group)
    parameters = [parameter for group in groups for parameter in group["params"]]
    return replace(options, offload=resolved(options.offload, parameters))


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has no names, or a hyperparameter is out of range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass model.named_parameters() or (name, parameter) pairs"
        )
    check(Hyperparameters, group)
    iteration_of(group)
