"""The optimizers of a model from the parameter groups of another Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from .. import registry
from ..engine.tensors.names import listed, warn
from ..engine.tensors.storage import coefficient_rows
from ..options import EXPERT, HYPERPARAMETERS, MuonOptions, OptionError, check
from .groups import ParamGroup, frozen_in, named_parameters_of
from .optimizer_set import OptimizerSet, build_optimizer
from .rules import Assignment

# Sources: muon.py of github.com/KellerJordan/Muon at 00ba60d, dion/muon.py of github.com/microsoft/dion at 0c20549.
DEFAULTS: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
    {
        ("use_muon", "muon"): {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "eps": 1e-7},
        ("use_muon", "adamw"): {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "eps": 1e-10},
        ("algorithm", "muon"): {
            "lr": 0.01,
            "mu": 0.95,
            "weight_decay": 0.01,
            "epsilon": 1e-8,
            "nesterov": False,
            "adjust_lr": "spectral_norm",
            "ns_coefficients": "you_jiacheng",
        },
        ("algorithm", "adamw"): {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.01, "epsilon": 1e-8},
    }
)
"""Defaults by the key that marks a group's algorithm, and the algorithm."""
ADJUST_LR = MappingProxyType({"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw"})
"""`adjust_lr_fn` by dion's `adjust_lr`."""
TAKEN = frozenset(
    {
        *("params", "param_names", "names", "use_muon", "algorithm", "flatten", "step", "initial_lr"),
        *("lr", "momentum", "mu", "nesterov", "weight_decay", "ns_steps", "ns_coefficients", "eps", "epsilon"),
        *("adjust_lr", "adjust_lr_fn", "betas", "beta1", "beta2"),
    }
)


def optimizers_of_groups(
    modules: Sequence[nn.Module],
    groups: Iterable[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
) -> OptimizerSet:
    """The optimizers of groups marked by Keller Jordan's `use_muon` or dion's `algorithm`.

    `defaults`: of keys that a group lacks, in the spelling of the groups. `tables`: options of whole optimizers.

    Raises:
        OptionError: for a group without a mark, an algorithm other than Muon and AdamW, and an unknown key.
        ValueError: for a tensor that is not the model's, or is in two groups.
    """
    given = list(groups)
    marks = [key for key in ("use_muon", "algorithm") if any(key in group for group in given)]
    if len(marks) != 1:
        raise OptionError(
            "groups:", "mark those of Muon by use_muon = True, as Keller Jordan's, or by algorithm, as dion's"
        )
    parameters, (mark,) = named_parameters_of(modules), marks
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    made: dict[str, list[ParamGroup]] = {}
    assigned: dict[str, Assignment] = {}
    for index, group in enumerate(given):
        place, params = f"groups[{index}]", group["params"]
        optimizer = _optimizer(group, mark, place)
        options = _options({**DEFAULTS[mark, optimizer], **defaults, **group}, optimizer, place)
        fqns = []
        for item in [params] if isinstance(params, Tensor) else params:
            parameter = item if isinstance(item, Tensor) else item[1]
            if (fqn := names.get(parameter, "")) in assigned:
                raise ValueError(f"{place}: {fqn} is in {assigned[fqn].reason} too; give every parameter once")
            if not fqn:
                raise ValueError(
                    f"{place}: a tensor of shape {tuple(parameter.shape)} is not the model's; make the groups from the "
                    "parameters of this model, after fully_shard"
                )
            assigned[fqn] = Assignment(fqn, tuple(parameter.shape), optimizer, place, None)
            fqns.append(fqn)
        made.setdefault(optimizer, []).append(ParamGroup(None, f"{optimizer}/{index}", tuple(fqns), options))
    for name, table in tables.items():
        # The other options would be left out without a word.
        for key in (key for key in table if key not in registry.optimizers.get(name).shared):
            remedy = f"expert=Expert({key}=...)" if key in EXPERT else "a key of its groups"
            raise OptionError(f"{name}[{key!r}]", f"is not a keyword of the whole optimizer; pass {remedy}")
    frozen = frozen_in(modules)
    if left := [fqn for fqn in parameters if fqn not in assigned and fqn not in frozen]:
        warn(f"{listed(left)}: in no group, so that no optimizer trains them")
    optimizers = {name: build_optimizer(name, made[name], tables.get(name, {}), parameters) for name in made}
    whole = tuple(assigned[fqn] for fqn in parameters if fqn in assigned and fqn not in frozen)
    return OptimizerSet(whole, whole, made, optimizers, tuple(parameters), tuple(sorted(frozen)))


def _optimizer(group: Mapping[str, Any], mark: str, place: str) -> str:
    if mark == "use_muon":
        if mark not in group:
            raise OptionError(f"{place}:", "has no use_muon; set True for Muon, False for AdamW")
        return "muon" if group[mark] else "adamw"
    algorithm = str(group.get(mark, "muon"))
    if algorithm not in ("muon", "adamw"):
        raise OptionError(f"{place}.algorithm", f"= {algorithm!r} is not here; choose 'muon' or 'adamw'")
    return algorithm


def _options(values: Mapping[str, Any], optimizer: str, place: str) -> dict[str, Any]:
    """A group's hyperparameters in this package's spelling."""
    if unknown := sorted(values.keys() - TAKEN):
        takes = ", ".join(sorted(TAKEN))
        raise OptionError(f"{place}.{unknown[0]}", f"is not a key of a group here; it takes {takes}")
    if values.get("flatten", False):
        problem = (
            "= True: describe the matrices of a convolution by muon={'split': [...]} with dims, and remove the key"
        )
        raise OptionError(f"{place}.flatten", problem)
    if optimizer == "muon":
        return hyperparameters_of(values)
    betas = values["betas"] if "beta1" not in values else (values["beta1"], values["beta2"])
    eps = values.get("epsilon", values.get("eps"))
    return {"lr": values["lr"], "weight_decay": values["weight_decay"], "betas": tuple(betas), "eps": eps}


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """From a group of another optimizer. Muon's own names win."""
    values = {name: getattr(MuonOptions, name) for name in HYPERPARAMETERS}
    values["adjust_lr_fn"] = "original"
    spellings = {"momentum": group.get("mu"), "eps": group.get("epsilon")}
    values |= {key: value for key, value in spellings.items() if value is not None}
    if "adjust_lr" in group and "adjust_lr_fn" not in group:
        if (adjust_lr := group["adjust_lr"]) not in ADJUST_LR:
            problem = f"= {adjust_lr!r} has no adjust_lr_fn here; pass adjust_lr_fn=... to converted"
            raise OptionError("adjust_lr", problem)
        values["adjust_lr_fn"] = ADJUST_LR[adjust_lr]
    values |= {key: group[key] for key in HYPERPARAMETERS if key in group}
    values["ns_coefficients"] = coefficient_rows(values["ns_coefficients"])
    check(MuonOptions, values)
    return values
