"""Checks of a state dict before loading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..options import HYPERPARAMETERS
from ..tensors.dtensor import local
from ..tensors.storage import TrainedParam, placement_key
from ..tensors.warning import warn
from .eight_bit import SCALES
from .groups import check_group, rows_of
from .momentum import fits


@contextmanager
def after_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state dict after the optimizer's load hooks, which torch does not run again within the context."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    for hook in hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    try:
        yield state_dict
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks


def completed(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A state dict of Muon or torch.optim.Muon, with today's names, and with current values of newer options.

    Raises ValueError without groups or state.
    """
    if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(
            f"state_dict: has no {' and no '.join(missing)}; pass what an optimizer's state_dict() returned"
        )
    saved_groups = list(state_dict["param_groups"])
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=False)):
        if not is_muons(saved):
            continue
        saved_groups[index] = saved = renamed(saved)
        if missing := [name for name in HYPERPARAMETERS if name not in saved]:
            warn(f"the state dict has no {', '.join(missing)}: the present values stay")
            saved_groups[index] = {**saved, **{name: group[name] for name in missing}}
    return {**state_dict, "param_groups": saved_groups}


def is_muons(group: Mapping[str, Any]) -> bool:
    """Whether a saved group is of Muon, or of torch.optim.Muon, which has the same keys."""
    return "ns_coefficients" in group


def renamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group with `adjust_lr_fn` for the earlier `lr_scale`, and with coefficients by step."""
    result = {**group, "ns_coefficients": rows_of(group["ns_coefficients"])}
    if "adjust_lr_fn" not in group and "lr_scale" in group:
        # Beside `adjust_lr_fn`, `lr_scale` is a key of another library.
        earlier = result.pop("lr_scale")
        result["adjust_lr_fn"] = "spectral_unclamped" if earlier == "spectral" else earlier
    return result


def check_saved_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for groups with different hyperparameters or parameters."""
    if len(saved) != len(groups):
        raise ValueError(f"the state dict has {len(saved)} parameter groups, and this Muon {len(groups)}")
    for group, saved_group in zip(groups, saved, strict=True):
        names = group["param_names"]
        if missing := [name for name in HYPERPARAMETERS if name not in saved_group]:
            raise ValueError(
                f"the state dict is of another optimizer: its groups have no {', '.join(missing)}; add them to load "
                "its momentum"
            )
        check_group({**saved_group, "param_names": names})
        if saved_group.get("param_names", names) != names or len(saved_group["params"]) != len(names):
            raise ValueError(f"the state dict is of other parameters: {saved_group.get('param_names')}, not {names}")


def saved_params(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], current: Mapping[Tensor, Tensor]
) -> Iterator[tuple[Any, Tensor]]:
    """(key in the state dict, trained parameter). `current`: the optimizer's momentum by parameter.

    Raises ValueError like `check_saved_groups`, and for a momentum that is missing or does not fit.
    """
    check_saved_groups(groups, state_dict["param_groups"])
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for fqn, parameter, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            if not parameter.requires_grad:
                continue
            momentum = state_dict["state"].get(key, {}).get("momentum_buffer")
            if momentum is None or not fits(momentum, current[parameter], parameter):
                raise ValueError(
                    f"{fqn}: the state dict has no momentum with the parameter's mesh and placements; load the "
                    "state of another layout or muon.state with torch.distributed.checkpoint"
                )
            if momentum.dtype != current[parameter].dtype and torch.int8 in (momentum.dtype, current[parameter].dtype):
                raise ValueError(
                    f"{fqn}: the state dict has a momentum in {momentum.dtype}, and this Muon in "
                    f"{current[parameter].dtype}; set state_dtype as it was saved"
                )
            yield key, parameter


def saved_states(
    params: Sequence[TrainedParam],
    current: Mapping[Tensor, Mapping[str, Any]],
    saved: Mapping[Tensor, Mapping[str, Any]],
) -> list[tuple[Tensor, Tensor]]:
    """(current, saved) local tensors of each further state; `current` and `saved` are optimizer states by parameter.

    Raises ValueError for a missing or differently placed state.
    """
    pairs = []
    for trained in params:
        for key, old in current[trained.param].items():
            if key == "momentum_buffer":
                continue
            loaded = saved[trained.param].get(key)
            if loaded is None and key == SCALES:
                raise ValueError(f"{trained.fqn}: the state dict has no {key} of an int8 momentum")
            if loaded is None or placement_key(loaded) != placement_key(old):
                raise ValueError(
                    f"{trained.fqn}: the state dict has no {key} on the ranks that orthogonalize the matrix; load a "
                    "state of another plan with torch.distributed.checkpoint, and build Muon with the rule that saved"
                )
            pairs.append((local(old), local(loaded)))
    return pairs


def checked_state(fqn: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The saved tensors for a parameter's `current` state. Raises ValueError for others."""
    missing = [name for name in current if name not in saved]
    if missing:
        raise ValueError(f"{fqn}: the state dict is of another optimizer: its states have no {', '.join(missing)}")
    loaded = {name: torch.as_tensor(saved[name]) for name in current}
    for name, value in current.items():
        # copy_ would broadcast a tensor of another shape, and take another rank's shard for this rank's.
        if placement_key(loaded[name]) != placement_key(value):
            raise ValueError(
                f"{fqn}: the state dict has its {name} with another shape, mesh or placements than the parameter's; "
                "load a state of another layout with torch.distributed.checkpoint"
            )
    return loaded
