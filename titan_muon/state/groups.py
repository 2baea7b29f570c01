"""The hyperparameters of parameter groups: their checks, and the Newton-Schulz iteration they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..options import HYPERPARAMETERS, Hyperparameters, MuonOptions, OptionError, Split, check
from ..orthogonalize import Iteration, iteration
from ..tensors.matrices import stack_of
from ..tensors.storage import STEP
from .host import resolved

KEYS = frozenset((*HYPERPARAMETERS, "params", "param_names", "initial_lr", "optimizer", STEP))
"""Keys of a group when it is given to Muon. Schedulers add keys of their own later."""


def iteration_of(group: Mapping[str, Any]) -> Iteration:
    """The Newton-Schulz iteration of a parameter group. Raises ValueError for coefficients that are none."""
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def iteration_changed(group: Mapping[str, Any], planned: Iteration) -> bool:
    """Whether a group's Newton-Schulz iteration is no longer the planned one."""
    try:
        return iteration_of(group) != planned
    except ValueError:
        return True


def checked(groups: Sequence[Mapping[str, Any]], options: MuonOptions) -> MuonOptions:
    """The options as the parameters in these groups have them. Raises ValueError as `check_group`."""
    for group in groups:
        check_group(group)
    parameters = [parameter for group in groups for parameter in group["params"]]
    return replace(options, offload=resolved(options.offload, parameters))


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError unless a group has names and hyperparameters in range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass model.named_parameters() or (name, parameter) pairs"
        )
    check(Hyperparameters, group)
    iteration_of(group)


def check_params(group: Mapping[str, Any], splits: Sequence[Split]) -> None:
    """Raise ValueError for a new group that Muon cannot train: unknown keys, and parameters that hold no matrices."""
    check_group(group)
    for key in group.keys() - KEYS:
        if key in {field.name for field in fields(MuonOptions)}:
            raise OptionError(key, "holds for all parameters of a Muon; pass it to Muon instead of a group")
        raise OptionError(key, f"is no key of a Muon group; it takes {', '.join(HYPERPARAMETERS)}")
    for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"{fqn}: has dtype {parameter.dtype}, and Muon trains real floating-point matrices; train a complex "
                "parameter by torch.view_as_real, or give it to another optimizer"
            )
        stack_of(fqn, parameter.shape, splits)
