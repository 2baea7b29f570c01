"""Checks of parameter groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...options import (
    EXPERT,
    HYPERPARAMETERS,
    OTHER_NAMES,
    SHARED,
    MuonOptions,
    OptionError,
    Split,
    check,
    refuse_removed,
)
from ..orthogonalize import Iteration, iteration
from ..tensors.matrices import check_splits, doubts_about, stack_of
from ..tensors.names import LOOKED_UP, canonical_fqn, listed, named_parameters
from ..tensors.storage import STEP

KEYS = (*HYPERPARAMETERS, "algorithm", "params", "param_names", "initial_lr", "optimizer", STEP)
"""Keys of a group that this package reads or writes."""

DIONS = ("adamw", "lion")
"""Values of `algorithm` that mark groups of another optimizer in dion."""
SIMILAR = 0.85
"""Ratio of equal letters above which an unknown key is a misspelt key. Below: `max_momentum`, of OneCycleLR."""


def splits_of(splits: Any) -> tuple[Split, ...]:
    """The argument `split` of Muon. Raises OptionError for anything but a sequence of Split."""
    given = tuple(splits) if isinstance(splits, Sequence) else (splits,)
    for split in given:
        if not isinstance(split, Split) or not isinstance(splits, Sequence):
            remedy = (
                "pass a list, as split=[titan_muon.Split(match='*.qkv', dims='(p h) d -> p | h d', lengths={'p': 3})]"
            )
            raise OptionError("split", f"= {split!r} is not accepted; {remedy}")
    return given


def iteration_of(group: Mapping[str, Any]) -> Iteration:
    """The iteration of a group. Raises ValueError for invalid coefficients."""
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def iteration_changed(group: Mapping[str, Any], planned: Iteration) -> bool:
    """Whether a group's iteration differs from the planned iteration."""
    try:
        return iteration_of(group) != planned
    except ValueError:
        return True


def check_groups(
    groups: Sequence[Mapping[str, Any]], splits: Sequence[Split], check_by_rule: Callable[[Mapping[str, Any]], None]
) -> None:
    """Raise ValueError as `check_group`, `check_splits` and the rule."""
    for group in groups:
        check_group(group)
        check_by_rule(group)
    # A pipeline stage may have no matrices at all.
    if names := [name for name, _ in named_parameters(groups)]:
        check_splits(names, splits)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has no names, or a hyperparameter is out of range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass (name, parameter) pairs of matrices, pass "
            "titan_muon.parameter_groups(model)['muon'], or give the model to titan_muon.Hybrid"
        )
    check_lr(group["lr"])
    check(MuonOptions, {name: group[name] for name in HYPERPARAMETERS})
    iteration_of(group)


def check_lr(lr: object) -> None:
    """Raise ValueError for a learning rate in a tensor of several elements."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: Tensor lr must be 1-element, and this one has shape {tuple(lr.shape)}")


def given_groups(params: Any, *, alone: bool) -> Any:
    """The constructor's parameters or groups, as torch's constructor takes them. Raises ValueError for a model.

    `alone`: whether no other rank has parameters, so that torch may refuse an empty list.
    """
    if isinstance(params, nn.Module):
        raise ValueError(
            "Muon takes named matrices, not a model; use titan_muon.Hybrid(model), or "
            "Muon(titan_muon.parameter_groups(model)['muon'])"
        )
    if isinstance(params, Tensor):
        return params
    groups = list(params)
    # torch accepts an empty group, and a pipeline stage may have no matrices.
    return groups if groups or alone else [{"params": [], "param_names": []}]


def named_group(group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, alone: bool) -> dict[str, Any]:
    """The user's group with names, and with coefficients by step.

    `others`: earlier groups. `alone`: whether a single process may name parameters `number.index`.
    """
    check_keys(group)
    result, params = dict(group), group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    numbered = alone and all(other["param_names"] == _numbers(i, other["params"]) for i, other in enumerate(others))
    pairs = bool(params) and not isinstance(params[0], Tensor)
    if not pairs and "param_names" not in result:
        if numbered:
            result["param_names"] = _numbers(len(others), params)
    elif others and numbered:
        raise ValueError("this group has names, and the groups before it have none; give every parameter its name")
    elif pairs:
        params = [(canonical_fqn(name), parameter) for name, parameter in params]
    else:
        result["param_names"] = [canonical_fqn(name) for name in result["param_names"]]
    if "ns_coefficients" in result:
        result["ns_coefficients"] = coefficient_rows(result["ns_coefficients"])
    return {**result, "params": params}


NUMBERS = re.compile(r"\d+\.\d+")
"""Names of parameters without names."""


def _numbers(group: int, params: Sequence[Tensor]) -> list[str]:
    return [f"{group}.{index}" for index in range(len(params))]


def coefficient_rows(ns_coefficients: Any) -> Any:
    """Coefficients with a single (a, b, c), as in torch.optim.Muon, as a row."""
    flat = isinstance(ns_coefficients, Sequence) and not isinstance(ns_coefficients, str)
    if flat and len(ns_coefficients) == 3 and all(isinstance(number, int | float) for number in ns_coefficients):
        return [list(ns_coefficients)]
    return ns_coefficients


def check_keys(group: Mapping[str, Any]) -> None:
    """Raise OptionError if a new group has a key that belongs to Muon instead of a group, or is nearly a key of ours.

    All other keys pass, because schedulers and other libraries have keys of their own, as timm's `lr_scale`.
    """
    for key, value in group.items():
        if key in SHARED and key not in KEYS:
            written = f"expert=Expert({key}=...)" if key in EXPERT else "it"
            raise OptionError(key, f"holds for all parameters of a Muon; pass {written} to Muon instead of a group")
        if (key == "use_muon" and not value) or (key == "algorithm" and value in DIONS):
            raise OptionError(
                key,
                f"= {value!r} marks parameters of another algorithm; give them to titan_muon.adamw.AdamW, or the whole "
                "model to titan_muon.Hybrid",
            )
        if key == "maximize" and value:
            raise OptionError(key, "is not a key of a Muon group; negate the loss")
        refuse_removed([key])
        # Layer decay's `lr_scale` is a number.
        name = OTHER_NAMES.get(key) if key != "lr_scale" or isinstance(value, str) else None
        similar = [] if key in KEYS else get_close_matches(key, (*KEYS, *SHARED), 1, SIMILAR)
        if name or similar:
            raise OptionError(key, f"is not a key of a Muon group; did you mean {name or similar[0]}?")


def other_algorithm(group: Mapping[str, Any]) -> str | None:
    """The key that marks a group of another algorithm than Muon: Keller Jordan's `use_muon`, or dion's `algorithm`."""
    if not group.get("use_muon", True):
        return "use_muon"
    return "algorithm" if group.get("algorithm", "muon") != "muon" else None


def check_params(group: Mapping[str, Any], splits: Sequence[Split]) -> None:
    """Raise ValueError for parameters of a new group without names or without matrices."""
    check_group(group)
    names: dict[Tensor, str] = {}
    for fqn, parameter in named_parameters([group]):
        # PyTorch warns of a tensor repeated without names. `build` refuses it.
        if parameter in names and NUMBERS.fullmatch(fqn) is None:
            raise ValueError(f"{fqn}: is the same tensor as {names[parameter]}; give every parameter once")
        names[parameter] = fqn
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"{fqn}: has dtype {parameter.dtype}, and Muon trains real floating-point matrices; train a complex "
                "parameter by torch.view_as_real, or give it to another optimizer"
            )
        stack_of(fqn, parameter.shape, splits)


def doubts_of(group: Mapping[str, Any], splits: Sequence[Split]) -> Iterator[str]:
    """Warnings about parameters for another optimizer."""
    trained = [pair for pair in named_parameters([group]) if pair[1].requires_grad]
    looked_up = [fqn for fqn, _ in trained if any(fnmatchcase(fqn, pattern) for pattern in LOOKED_UP)]
    if looked_up:
        yield (
            f"{listed(looked_up, 3)}: an embedding or output head by its name, which Muon is not meant for; give it to "
            "AdamW, or give the model to titan_muon.Hybrid"
        )
    yield from doubts_about({fqn: parameter.shape for fqn, parameter in trained}, splits)
