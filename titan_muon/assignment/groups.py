"""Assignments of a whole model, and its parameter groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import options, registry
from ..adamw import AdamW
from ..engine.tensors.names import canonical_fqn, listed, warn
from ..muon import Muon
from ..options import OptionError
from .options import Rule
from .roles import IsMuon, ParameterInfo, inspect_model
from .rules import Assignment, assign_parameters

registry.optimizers.register(
    "muon",
    registry.OptimizerEntry(Muon, [k for k in options.KEYWORDS if k not in options.HYPERPARAMETERS], ["algorithm"]),
)
registry.optimizers.register(
    "adamw", registry.OptimizerEntry(AdamW, ("foreach", "fused", "state_dtype", "offload", "on_bad_gradient"))
)

OPTIMIZER = "optimizer"
"""Key of a parameter group: the name of the optimizer that updates the group."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of an optimizer with equal hyperparameters.

    `rule`: index of their rule. `tag`: name in metrics. `spared`: vectors without weight decay.
    """

    rule: int | None
    tag: str
    names: tuple[str, ...]
    options: Mapping[str, Any]
    spared: bool = False

    def of_torch(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        # First, as in torch's groups: Megatron-FSDP reads the first key. Again, because a rule must not replace them.
        own = {"params": [parameters[n] for n in self.names], "param_names": list(self.names)}
        return {**own, **self.options, **own}


def modules_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """The model's parts. Raises ValueError for parameters in place of modules."""
    modules = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(
            "model: is a list of parameters, and the roles of modules decide which parameters Muon takes; pass the "
            "model itself, as in Hybrid(model), or give a list of named matrices to titan_muon.Muon"
        )
    return modules


def assign(
    model: nn.Module | Iterable[nn.Module],
    rules: Sequence[Rule] = (),
    *,
    defaults: bool = True,
    router: str = "adamw",
    is_muon: IsMuon | None = None,
) -> tuple[Assignment, ...]:
    """The optimizer of each trained parameter, with the reason. Parameters may be on the meta device.

    Arguments and errors as in `Hybrid`.
    """
    modules = modules_of(model)
    frozen, seen = frozen_in(modules), inspect_model(modules, frozen=True, is_muon=is_muon)
    assigned = assigned_model(seen, rules, router if defaults else None, frozen)
    return tuple(a for a in assigned if a.fqn not in frozen)


def parameter_groups(
    model: nn.Module | Iterable[nn.Module],
    rules: Sequence[Rule] = (),
    *,
    defaults: bool = True,
    router: str = "adamw",
    decay_vectors: bool = False,
    is_muon: IsMuon | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups by optimizer, for separate optimizers in place of a `Hybrid`.

    `Muon(groups["muon"])` and `titan_muon.adamw.AdamW(groups["adamw"])` take steps as `Hybrid(model)`, and exchange
    checkpoints with a `Hybrid` and with recipes by torch.distributed.checkpoint. Weights with known fused layouts have
    an `Assignment.split`: pass `Muon` the splits, as the warning says.

    Returns:
        Groups with `params`, `param_names`, `optimizer`, and the options of a rule.

    Arguments and errors as in `Hybrid`.
    """
    modules = modules_of(model)
    seen, parameters = inspect_model(modules, frozen=True, is_muon=is_muon), named_parameters_of(modules)
    assigned = assigned_model(seen, rules, router if defaults else None, frozen_in(modules))
    if fused := [a.fqn for a in assigned if a.optimizer == "muon" and a.split is not None]:
        warn(
            f"{listed(fused, 1)}: several matrices in a weight; pass "
            "Muon split=[a.split for a in assign(model, rules) if a.split and a.optimizer == 'muon']"
        )
    groups = groups_of_parameters(rules, {}, assigned, decay_vectors=decay_vectors)
    return {name: [group.of_torch(parameters) | {OPTIMIZER: name} for group in groups[name]] for name in groups}


def named_parameters_of(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """All parameters, by canonical name."""
    return {canonical_fqn(name): parameter for part in parts for name, parameter in part.named_parameters()}


def frozen_in(parts: Iterable[nn.Module]) -> frozenset[str]:
    """Canonical names of the parameters without gradients."""
    return frozenset(name for name, p in named_parameters_of(parts).items() if not p.requires_grad)


def assigned_model(
    parameters: Mapping[str, ParameterInfo],
    rules: Sequence[Rule],
    router: str | None,
    frozen: Collection[str] = (),
    *,
    is_part: bool = False,
) -> tuple[Assignment, ...]:
    """As `assign_parameters`, for all `parameters`, also the `frozen`.

    Raises OptionError also if Muon trains no parameter although defaults apply to some, unless other ranks may hold
    further parts of the model (`is_part`).
    """
    assigned = assign_parameters(parameters, rules, router)
    trained = [a for a in assigned if a.fqn not in frozen]
    by_default = [a for a in trained if a.by_default]
    # A model with unknown names or shapes would otherwise train with AdamW alone.
    if (by_default or not trained) and not any(a.optimizer == "muon" for a in trained) and not is_part:
        roles = Counter(a.role or a.reason for a in trained)
        counts = ", ".join(f"{count} {role}" for role, count in roles.items()) or "none needs a gradient"
        match = "(match = '*lora_*', optimizer = 'muon')" if "lora" in roles else "with optimizer = 'muon'"
        raise OptionError(
            "rules:",
            f"Muon takes no parameter of this model ({counts}); add a rule {match}, or confirm with a last rule "
            "(match = '*', optimizer = 'adamw')",
        )
    return assigned


def groups_of_parameters(
    rules: Sequence[Rule],
    tables: Mapping[str, Mapping[str, Any]],
    assigned: Sequence[Assignment],
    *,
    decay_vectors: bool,
) -> dict[str, list[ParamGroup]]:
    """Groups by optimizer: one for the defaults, and one for each rule with options.

    Unless `decay_vectors`, vectors have a group without weight decay, except where a rule sets `weight_decay`.
    """
    names: dict[tuple[str, int | None, bool], list[str]] = {}
    for a in assigned:
        # Each further group would cost foreach calls in a step.
        rule = a.rule if a.rule is not None and rules[a.rule].options else None
        decides = rule is not None and "weight_decay" in rules[rule].options
        # parameter_groups() has no tables, and AdamW's default decays.
        decays = a.optimizer == "adamw" or "weight_decay" in tables.get(a.optimizer, {})
        spared = decays and a.optimizer != "muon" and a.is_vector and not decay_vectors and not decides
        names.setdefault((a.optimizer, rule, spared), []).append(a.fqn)
    groups: dict[str, list[ParamGroup]] = {}
    for (optimizer, rule, spared), fqns in names.items():
        entry, of_rule = registry.optimizers.get(optimizer), {} if rule is None else rules[rule].options
        options = {**tables.get(optimizer, {}), **of_rule} | ({"weight_decay": 0.0} if spared else {})
        of_group = {key: value for key, value in options.items() if key not in entry.shared}
        of_group |= {key: of_rule[key] for key in entry.by_rule if key in of_rule}
        tag = optimizer if rule is None else f"{optimizer}/{rules[rule].match}"
        groups.setdefault(optimizer, []).append(ParamGroup(rule, tag, tuple(fqns), of_group, spared))
    return groups
