"""State dicts of other Muon optimizers, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..assignment.given_groups import hyperparameters_of
from ..engine.orthogonalize.coefficients import coefficients
from ..engine.state.saved import is_muons, renamed
from ..engine.tensors.storage import STEP
from ..options import OptionError

Source = Literal["torch", "torchtitan", "keller_jordan", "dion", "dmuon"]
"""Optimizers whose state dicts `converted` reads.

`torch` is torch.optim.Muon, `torchtitan` DistMuon, `keller_jordan` github.com/KellerJordan/Muon: their momentum is the
average m <- momentum m + (1 - momentum) g, as in this package. `dion` is the Muon of github.com/microsoft/dion, `dmuon`
github.com/X-Square-Robot/dmuon: their momentum is the sum m <- momentum m + g.
"""

SUMS = ("dion", "dmuon")


def converted(state_dict: Mapping[str, Any], source: Source, **hyperparameters: Any) -> dict[str, Any]:
    """A state dict for `Muon.load_state_dict`, from the state dict of another Muon.

    Args:
        state_dict: `state` with a `momentum_buffer` (dion: `momentum`) for each parameter, and `param_groups`; or from
            dmuon's `get_optimizer_state_dict`. Groups of other algorithms (AdamW, Lion) are left out.
        source: the optimizer of the state dict.
        hyperparameters: replace the source's, for all groups. Missing hyperparameters have the defaults of
            `options.Hyperparameters`, except `adjust_lr_fn`, which defaults to "original".

    Returns `state` with `momentum_buffer`, in the source's dtype, and `param_groups` with Muon's keys.

    Raises:
        OptionError: for an unknown source, and for a value without an equivalent in Muon.
        ValueError: for a parameter without momentum.
    """
    if source not in get_args(Source):
        raise OptionError("source", f"= {source!r} is not one of {', '.join(get_args(Source))}")
    given, groups, state = state_dict["param_groups"], [], {}
    if names := list(state_dict.get("dedicated", ())):
        # dmuon scales updates by 0.2 sqrt(max(m, n)), and its second group is AdamW's.
        given = [{"adjust_lr_fn": "match_rms_adamw", **given[0], "params": names, "param_names": names}]
    # Keller Jordan's `use_muon`, or dion's `algorithm`, marks groups of other algorithms.
    for group in (g for g in given if g.get("use_muon", True) and g.get("algorithm", "muon") == "muon"):
        values = hyperparameters_of({**group, **hyperparameters})
        copied = {key: group[key] for key in ("params", "param_names", "initial_lr") if key in group}
        groups.append({**values, **copied})
        for key in group["params"]:
            # dmuon has the momentum by name.
            of_source = state_dict.get("state", state_dict.get("dedicated", {})).get(key, {})
            average = of_source.get("momentum_buffer", of_source.get("momentum"))
            if not isinstance(average, Tensor):
                raise ValueError(f"parameter {key!r}: the state dict has no momentum_buffer; save one after a step")
            scale = 1 - float(values["momentum"]) if source in SUMS else 1
            state[key] = {"momentum_buffer": average if scale == 1 else average * scale}
    return {"state": state, "param_groups": groups}


def as_torch(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for `torch.optim.Muon.load_state_dict`, from a state dict of Muon.

    Raises:
        OptionError: for options without an equal in the installed torch.optim.Muon: a number for `adjust_lr_fn`, before
            PyTorch 2.15 also "spectral_unclamped"; coefficients that differ between steps; algorithms with states of
            their own; and states in another kind of dtype than floating-point.
        ValueError: for groups of another optimizer, as in a Hybrid's state dict.
    """
    groups = []
    if not all(is_muons(group) for group in state_dict["param_groups"]):
        raise ValueError(
            "state_dict: has groups of another optimizer than Muon; pass hybrid.optimizers['muon'].state_dict()"
        )
    dtypes = {value["momentum_buffer"].dtype for value in state_dict["state"].values()}
    for kind in sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if not dtype.is_floating_point):
        problem = f"= {kind!r} has no equivalent in torch.optim.Muon; save with float32 or bfloat16"
        raise OptionError("state_dtype", problem)
    if extra := {name for value in state_dict["state"].values() for name in value} - {"momentum_buffer"}:
        raise OptionError("algorithm", f"keeps {', '.join(sorted(extra))}, which torch.optim.Muon has not")
    for group in map(renamed, state_dict["param_groups"]):
        if group.get("algorithm", "muon") != "muon":
            raise OptionError("algorithm", f"= {group['algorithm']!r} of a group is not in torch.optim.Muon")
        steps = coefficients(group["ns_coefficients"], group["ns_steps"])
        if len(set(steps)) > 1:
            raise OptionError("ns_coefficients", "differ between steps, and torch.optim.Muon repeats one (a, b, c)")
        try:
            # Muon.load_state_dict checks nothing, and its step takes a factor of 1 for unknown names.
            torch.optim.Muon([torch.empty(1, 1)], adjust_lr_fn=group["adjust_lr_fn"])
        except ValueError as error:
            problem = f"= {group['adjust_lr_fn']!r} is unknown to torch.optim.Muon of PyTorch {torch.__version__}"
            raise OptionError("adjust_lr_fn", problem) from error
        converted_group = {key: value for key, value in group.items() if key not in (STEP, "optimizer", "algorithm")}
        groups.append({**converted_group, "ns_coefficients": steps[0]})
    state = {key: {"momentum_buffer": value["momentum_buffer"]} for key, value in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}
