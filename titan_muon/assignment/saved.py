"""State dicts of a Hybrid: groups by the names of parameters, and the part of each optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..adamw import AdamW
from ..engine.exchange.agreement import Agreement
from ..engine.state.saved import ParamGroups, is_muons, renamed
from ..engine.tensors.names import canonical_fqn, listed, named_parameters, warn
from ..muon import Muon
from .groups import OPTIMIZER


def load_parts(
    state_dict: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    groups: ParamGroups,
    orders: Sequence[Sequence[str]],
    agreement: Agreement,
) -> None:
    """Load a state dict into a Hybrid's `optimizers`, with `groups`. Collective. `orders`: as in `of_adamw`.

    Raises ValueError on every rank, before anything is loaded.
    """
    saved = agreement.raise_on_all_ranks(lambda: saved_groups(state_dict, groups, orders))
    of_adamw_alone = not any(OPTIMIZER in group for group in state_dict["param_groups"])
    parts: dict[Optimizer, dict[str, Any]] = {}
    for name, optimizer in optimizers.items():
        if name == "adamw" or not of_adamw_alone:
            mine = [group for group in saved if group[OPTIMIZER] == name]
            keys = {key for group in mine for key in group["params"]}
            states = {key: value for key, value in state_dict["state"].items() if key in keys}
            parts[optimizer] = {"state": states, "param_groups": mine}
    adamws = [part for part in parts if isinstance(part, AdamW)]
    others = [part for part in parts if not isinstance(part, Muon | AdamW)]
    before = [{"state": part.state, "param_groups": part.param_groups} for part in others]
    try:
        agreement.raise_on_all_ranks(lambda: [part.load_state_dict(parts[part]) for part in others])
        agreement.raise_on_all_ranks(lambda: [adamw.checked_states(parts[adamw]) for adamw in adamws])
        for muon in (part for part in parts if isinstance(part, Muon)):
            muon.load_state_dict(parts[muon])
    except Exception:
        # Optimizers of other packages load at once, into new dicts and tensors.
        for part, old in zip(others, before, strict=True):
            part.__setstate__(old)
        raise
    for adamw in adamws:
        adamw.load_state_dict(parts[adamw])


def saved_groups(
    state_dict: Mapping[str, Any], groups: ParamGroups, orders: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The saved groups, cut as `groups`. Raises ValueError as `of_adamw` and `regrouped`, and without groups."""
    if missing := {"state", "param_groups"} - state_dict.keys():
        absent = " and no ".join(sorted(missing, reverse=True))
        raise ValueError(f"state_dict: has no {absent}; pass what state_dict() returned")
    saved = state_dict["param_groups"]
    if saved and all("betas" in group and OPTIMIZER not in group for group in saved):
        return of_adamw(saved, groups, orders)
    return regrouped(saved, groups)


def regrouped(saved: ParamGroups, groups: ParamGroups) -> list[dict[str, Any]]:
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


def of_adamw(saved: ParamGroups, groups: ParamGroups, orders: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
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


def _check_same_parameters(sources: Mapping[str, tuple[Mapping[str, Any], Any]], groups: ParamGroups) -> None:
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
