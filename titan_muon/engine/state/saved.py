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
from ..tensors.names import canonical_fqn, listed, named_parameters
from ..tensors.storage import STEP, placement_key
from ..tensors.warning import warn
from .groups import check_group, rows_of

Groups = Sequence[Mapping[str, Any]]


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


def completed(state_dict: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
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
    result = {**group, "ns_coefficients": rows_of(group["ns_coefficients"])}
    if "adjust_lr_fn" not in group and "lr_scale" in group:
        # Beside `adjust_lr_fn`, `lr_scale` is a key of another library.
        earlier = result.pop("lr_scale")
        result["adjust_lr_fn"] = "spectral_unclamped" if earlier == "spectral" else earlier
    return result


def check_saved_groups(groups: Groups, saved: Groups) -> None:
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
    groups: Groups, state_dict: Mapping[str, Any], current: Mapping[Tensor, Mapping[str, Any]]
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


def check_frozen(groups: Groups, state_dict: Mapping[str, Any], gathered: Callable[[Any], Mapping[int, Any]]) -> None:
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
    """Copy this rank's part of a saved state. A keeper alone takes its rows of a parameter's momentum."""
    target, source = local(current), local(saved)
    if target.numel() == 0:
        return
    if target.shape != source.shape:
        first = int(held_indices(current)[0][0] - held_indices(parameter)[0][0])
        source = source.narrow(0, first, target.size(0))
    target.copy_(source)


def regrouped(saved: Groups, groups: Groups) -> list[dict[str, Any]]:
    """The `saved` groups with the parameters of `groups`, so that groups may be cut differently.

    A hyperparameter that is missing, or was saved with several values for the parameters of a group, keeps the group's
    value, with a warning. Frozen parameters may be missing. Raises ValueError for other parameters, or another
    optimizer of any.
    """
    if any("optimizer" not in group or "param_names" not in group for group in saved):
        raise ValueError(
            "the state dict is of another optimizer: its groups have no 'optimizer'; load one that Hybrid saved"
        )
    saved = [renamed(group) if is_muons(group) else group for group in saved]
    sources = {
        fqn: (group, key) for group in saved for fqn, key in zip(group["param_names"], group["params"], strict=True)
    }
    _check_same_parameters(sources, groups)
    result, kept, missing = [], [], set[str]()
    for group in groups:
        new = {key: value for key, value in group.items() if key != "params"}
        found = [sources[fqn] for fqn in group["param_names"] if fqn in sources]
        for key in dict.fromkeys(k for source, _ in found for k in source if k not in ("params", "param_names")):
            values = [source[key] for source, _ in found if key in source]
            if all(value == values[0] for value in values):
                new[key] = values[0]
            else:
                kept.append(f"{key} of {listed(group['param_names'], 2)}")
        if found:
            missing |= group.keys() - {key for source, _ in found for key in source}
        # A frozen parameter without a saved place gets its name as the key.
        new["params"] = [sources[fqn][1] if fqn in sources else fqn for fqn in group["param_names"]]
        result.append(new)
    if missing:
        warn(f"the state dict has no {', '.join(sorted(missing))}: the present values stay")
    if kept:
        warn(f"the state dict was saved with other groups: the present values stay for {'; '.join(kept)}")
    return result


def of_adamw(saved: Groups, groups: Groups, orders: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The groups of AdamW with the places of their parameters in a state dict of torch.optim.AdamW.

    Hyperparameters stay those of `groups`. `orders`: names in orders that a single group without names may have.
    Raises ValueError for parameters without a known name, and for missing parameters.
    """
    if all("param_names" in group for group in saved):
        names = [canonical_fqn(name) for group in saved for name in group["param_names"]]
    else:
        count = len(saved[0]["params"])
        order = next((order for order in orders if len(saved) == 1 and len(order) == count), None)
        if order is None:
            raise ValueError(
                "the state dict is AdamW's, and its parameters have no names; add to each of its groups the key "
                "'param_names', with the names in the order of 'params'"
            )
        names = list(order)
    places = dict(zip(names, (key for group in saved for key in group["params"]), strict=True))
    mine = [group for group in groups if group["optimizer"] == "adamw"]
    if missing := [fqn for fqn, p in named_parameters(mine) if fqn not in places and p.requires_grad]:
        raise ValueError(
            f"{listed(missing)}: the state dict of AdamW has no such parameter; load one of the same model"
        )
    muon = [fqn for fqn, p in named_parameters(groups) if p.requires_grad and fqn not in dict(named_parameters(mine))]
    warn(
        "the state dict is AdamW's: its averages continue, and hyperparameters stay those of this Hybrid; it has no "
        f"momentum for {listed(muon, 2)}, whose momentum stays as it is, zero before the first step"
    )
    return [{**group, "params": [places.get(fqn, fqn) for fqn in group["param_names"]]} for group in mine]


def _check_same_parameters(sources: Mapping[str, tuple[Mapping[str, Any], Any]], groups: Groups) -> None:
    mine = {fqn: (group["optimizer"], p) for group in groups for fqn, p in named_parameters([group])}
    for fqn, (optimizer, parameter) in mine.items():
        other = sources[fqn][0]["optimizer"] if fqn in sources else "no optimizer"
        if other != optimizer and (fqn in sources or parameter.requires_grad):
            raise ValueError(
                f"{fqn}: the state dict has it with {other}, and this Hybrid with {optimizer}; give both the same rules"
            )
    if unknown := [fqn for fqn in sources if fqn not in mine]:
        raise ValueError(
            f"{listed(unknown)}: the state dict has further parameters than this Hybrid; give both the same model"
        )
