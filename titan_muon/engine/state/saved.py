"""State dicts before loading: checks, earlier names, and groups by the names of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...options import HYPERPARAMETERS
from ..tensors.dtensor import held_indices, local
from ..tensors.names import warn
from ..tensors.storage import STEP, check_group, coefficient_rows, placement_key

ParamGroups = Sequence[Mapping[str, Any]]


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


def completed(state_dict: Mapping[str, Any], groups: ParamGroups) -> dict[str, Any]:
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
        # The states are of the present algorithm, or refused.
        algorithm = {"algorithm": group["algorithm"]} if "algorithm" in group else {}
        saved = {key: value for key, value in renamed(saved).items() if key != "algorithm"}
        count = {STEP: group[STEP]} if STEP in group else {}
        saved_groups[index] = saved = {**count, **saved, **algorithm}
        if missing := [name for name in HYPERPARAMETERS if name not in saved]:
            warn(f"the state dict has no {', '.join(missing)}: the present values stay")
            saved_groups[index] = {**saved, **{name: group[name] for name in missing}}
    return {**state_dict, "param_groups": saved_groups}


def is_muons(group: Mapping[str, Any]) -> bool:
    """Whether a saved group is of Muon, or of torch.optim.Muon, which has the same keys."""
    return "ns_coefficients" in group


def renamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group with `adjust_lr_fn` for the earlier `lr_scale`, and with coefficients by step."""
    result = {**group, "ns_coefficients": coefficient_rows(group["ns_coefficients"])}
    if "adjust_lr_fn" not in group and "lr_scale" in group:
        # Beside `adjust_lr_fn`, `lr_scale` is a key of another library.
        earlier = result.pop("lr_scale")
        result["adjust_lr_fn"] = "spectral_unclamped" if earlier == "spectral" else earlier
    return result


def check_saved_groups(groups: ParamGroups, saved: ParamGroups) -> None:
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


def saved_states(
    groups: ParamGroups, state_dict: Mapping[str, Any], current: Mapping[Tensor, Mapping[str, Any]]
) -> Iterator[tuple[Any, Tensor, dict[str, Tensor]]]:
    """(key in the state dict, trained parameter, saved tensors). `current`: the states by parameter.

    Raises ValueError like `check_saved_groups` and `checked_state`.
    """
    check_saved_groups(groups, state_dict["param_groups"])
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for fqn, parameter, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            if parameter.requires_grad:
                states = state_dict["state"].get(key, {})
                yield key, parameter, checked_state(fqn, current[parameter], states, parameter)


def check_frozen(
    groups: ParamGroups, state_dict: Mapping[str, Any], gathered: Callable[[Any], Mapping[int, Any]]
) -> None:
    """Raise ValueError on every rank for a frozen parameter whose states only some ranks would load.

    The next checkpoint could not be saved. `gathered`: a value of all ranks, by rank; collective.
    """
    pairs = zip(groups, state_dict["param_groups"], strict=True)
    places = [
        place
        for group, saved in pairs
        for place in zip(group["param_names"], group["params"], saved["params"], strict=True)
    ]
    mine = {fqn: key in state_dict["state"] for fqn, parameter, key in places if not parameter.requires_grad}
    ranks: dict[str, dict[bool, int]] = {}
    for rank, loaded in gathered(mine).items():
        for fqn, has_states in loaded.items():
            ranks.setdefault(fqn, {})[has_states] = rank
    for fqn, by_presence in ranks.items():
        if len(by_presence) == 2:
            raise ValueError(
                f"{fqn}: is frozen, and the state dict has its states on rank {by_presence[True]} and not on rank "
                f"{by_presence[False]}; load one state dict on all ranks"
            )


def checked_state(
    fqn: str, current: Mapping[str, Any], saved: Mapping[str, Any], parameter: Tensor
) -> dict[str, Tensor]:
    """The saved tensors for a parameter's `current` state.

    Raises ValueError for a missing tensor, and for one with another shape, mesh, placement, or kind of dtype.
    """
    loaded = {name: torch.as_tensor(saved[name]) for name in current if name in saved}
    for name, value in current.items():
        if name in loaded and loaded[name].is_floating_point() != value.is_floating_point():
            raise ValueError(
                f"{fqn}: the state dict has a {name} in {loaded[name].dtype}, and this optimizer in {value.dtype}; set "
                "state_dtype as it was saved"
            )
        # copy_ would broadcast a tensor of another shape, and take another rank's shard for this rank's.
        placed = [placement_key(value), *([placement_key(parameter)] if name == "momentum_buffer" else [])]
        if name not in loaded or placement_key(loaded[name]) not in placed:
            raise ValueError(
                f"{fqn}: the state dict has no {name} with this optimizer's shape, mesh and placements; load the state "
                "of another layout or muon.state with torch.distributed.checkpoint, into the algorithm that saved it"
            )
    return loaded


def copy_state(saved: Tensor, current: Tensor, parameter: Tensor) -> None:
    """Copy this rank's part of a saved state. A keeper takes only its rows of a parameter's momentum."""
    target, source = local(current), local(saved)
    if target.numel() == 0:
        return
    if target.shape != source.shape:
        first = int(held_indices(current)[0][0] - held_indices(parameter)[0][0])
        source = source.narrow(0, first, target.size(0))
    target.copy_(source)
