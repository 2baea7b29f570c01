"""Parameter groups of each optimizer, from assignments, and the optimizers built from them."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .. import options, registry
from ..adam import AdamW
from ..muon import Muon
from ..options import Offload, OptionError, Rule, Split
from ..tensors.matrices import check_splits
from .roles import Seen
from .rules import Assignment, Default, assign, splits_with

registry.optimizers.register("muon", registry.OptimizerEntry(Muon, options.SHARED))
registry.optimizers.register("adamw", registry.OptimizerEntry(AdamW, ("foreach", "fused", "state_dtype", "offload")))


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of one optimizer with equal hyperparameters.

    Attributes:
        optimizer: name of the registered optimizer.
        rule: index of the rule that gives the parameters options of their own, or None.
        tag: name of the group in metrics.
        names: names of the parameters.
        options: hyperparameters.
    """

    optimizer: str
    rule: int | None
    tag: str
    names: tuple[str, ...]
    options: Mapping[str, Any]


def assigned_model(
    parameters: Mapping[str, Seen], rules: Sequence[Rule], defaults: Sequence[Default] | None
) -> tuple[Assignment, ...]:
    """The optimizer of each parameter of a whole model.

    Raises:
        OptionError: as `assign`, and if Muon gets no parameter although rules leave some to the defaults.
    """
    assigned = assign(parameters, rules, defaults)
    by_default = [a for a in assigned if a.rule is None]
    # A model whose names or shapes the defaults do not know would otherwise train with AdamW alone, without a word.
    if (by_default or not assigned) and not any(a.optimizer == "muon" for a in assigned):
        roles: dict[str, int] = {}
        for a in assigned:
            roles[a.role or a.reason] = roles.get(a.role or a.reason, 0) + 1
        counts = ", ".join(f"{count} {role}" for role, count in roles.items()) or "none needs a gradient"
        raise OptionError(
            "rules:",
            f"Muon takes no parameter of this model ({counts}); add a rule with optimizer = 'muon', or confirm with a "
            "last rule (match = '*', optimizer = 'adamw')",
        )
    return assigned


def grouped(
    rules: Sequence[Rule], tables: Mapping[str, Mapping[str, Any]], assigned: Sequence[Assignment]
) -> dict[str, list[ParamGroup]]:
    """Groups by optimizer: one for the defaults, and one for each rule with options of its own.

    Args:
        rules: rules that the assignments refer to.
        tables: options of each optimizer.
        assigned: the optimizer of each parameter.
    """
    names: dict[str, dict[int | None, list[str]]] = {}
    for a in assigned:
        # Rules without options share the group of the defaults: fewer groups are fewer foreach calls in a step.
        rule = a.rule if a.rule is not None and rules[a.rule].options else None
        names.setdefault(a.optimizer, {}).setdefault(rule, []).append(a.fqn)
    groups: dict[str, list[ParamGroup]] = {}
    for optimizer, by_rule in names.items():
        shared = registry.optimizers.get(optimizer).shared
        for rule, fqns in by_rule.items():
            own = {} if rule is None else rules[rule].options
            merged = {**tables.get(optimizer, {}), **own}
            hyperparameters = {key: value for key, value in merged.items() if key not in shared}
            tag = optimizer if rule is None else f"{optimizer}/{rules[rule].match}"
            groups.setdefault(optimizer, []).append(ParamGroup(optimizer, rule, tag, tuple(fqns), hyperparameters))
    return groups


def with_known_splits(
    tables: Mapping[str, Mapping[str, Any]],
    whole: Sequence[Assignment],
    parameters: Collection[str],
    *,
    is_stage: bool = False,
) -> Mapping[str, Mapping[str, Any]]:
    """The optimizers' tables, with the splits of known fused layouts in Muon's.

    Args:
        tables: options of each optimizer.
        whole: the optimizer of each parameter of the whole model.
        parameters: names of the parameters that this process holds.
        is_stage: whether this process holds a pipeline stage alone; splits of other stages are then left out.

    Raises:
        ValueError: for a split that matches no Muon parameter of the whole model.
    """
    splits: tuple[Split, ...] = tuple(tables.get("muon", {}).get("split", ()))
    taken = [a for a in whole if a.optimizer == "muon"]
    here = [a for a in taken if a.fqn in parameters]
    every = splits_with(splits, here)
    if is_stage:
        # Muon refuses a split that matches nothing, and does not know the parameters of other stages.
        check_splits([a.fqn for a in taken], splits)
        every = tuple(split for split in every if any(fnmatch.fnmatchcase(a.fqn, split.match) for a in here))
    if every == splits:
        return tables
    return {**tables, "muon": {**tables.get("muon", {}), "split": every}}


def check_offload(offload: Offload, optimizer: str) -> None:
    """Raise OptionError if `offload` asks an optimizer for states on the host that it keeps on the device."""
    # Where parameters are on the host, so are the states of any optimizer.
    if offload != "state" or "offload" in registry.optimizers.get(optimizer).shared:
        return
    able = ", ".join(n for n in registry.optimizers.names() if "offload" in registry.optimizers.get(n).shared)
    raise OptionError(
        "offload",
        f'= "{offload}": {optimizer} keeps its states on the device; set "none", or give its parameters to one of '
        f"{able}",
    )


@dataclass(frozen=True)
class Decision:
    """The optimizer of each parameter, and the groups and options of each optimizer in this process.

    Attributes:
        whole: the optimizer of each parameter of the whole model; pipeline ranks hold a part of them.
        groups: parameter groups by optimizer, with the parameters of this process.
        tables: options by optimizer.
    """

    whole: tuple[Assignment, ...]
    groups: Mapping[str, tuple[ParamGroup, ...]]
    tables: Mapping[str, Mapping[str, Any]]


def decided(
    model: Mapping[str, Seen],
    parameters: Collection[str],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    tables: Mapping[str, Mapping[str, Any]],
    *,
    offload: Offload = "none",
    is_stage: bool = False,
) -> Decision:
    """Decide which optimizer takes which parameter.

    Args:
        model: all parameters of the model.
        parameters: names of the parameters that this process holds.
        rules: rules in order; the first that matches a name decides.
        defaults: for parameters without a matching rule; None if the rules decide for every parameter.
        tables: options of each optimizer, by name.
        offload: tensors that are on the host between steps.
        is_stage: whether this process holds a pipeline stage alone.

    Raises:
        OptionError: for rules that take nothing or leave a parameter, and for an unknown optimizer.
        ValueError: for a split that matches no Muon parameter of the model.
    """
    # The whole model decides: all ranks build Muon together, and a pipeline rank that left out Muon, or one of its
    # groups, would leave the others waiting.
    whole = assigned_model(model, rules, defaults)
    groups = {}
    for name, every in grouped(rules, tables, whole).items():
        check_offload(offload, name)
        groups[name] = tuple(replace(group, names=tuple(n for n in group.names if n in parameters)) for group in every)
    return Decision(whole, groups, with_known_splits(tables, whole, parameters, is_stage=is_stage))


def built(
    name: str, groups: Sequence[ParamGroup], table: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> Optimizer:
    """The optimizer `name` with these groups.

    Args:
        name: name of the registered optimizer.
        groups: its groups.
        table: its options.
        parameters: parameters by name.

    Raises:
        OptionError: for an option that the optimizer refuses or does not know; of a rule's option, `option` is
            `rules[i].options.KEY`.
    """
    dicts = [
        {**group.options, "params": [parameters[n] for n in group.names], "param_names": list(group.names)}
        for group in groups
    ]
    of_rule = {key: group.rule for group in groups if group.rule is not None for key in group.options}
    own = {key: index for key, index in of_rule.items() if key not in table}

    def named(key: str) -> str:
        if key in own:
            return f"rules[{own[key]}].options.{key}"
        return key if name == "muon" else f"{name}.{key}"

    try:
        with warnings.catch_warnings():
            # The caller warns of the whole model, and knows the roles of its parameters.
            warnings.simplefilter("ignore")
            optimizer: Optimizer = registry.optimizers.get(name).build(dicts, **registry.shared_options(name, table))
    except OptionError as error:
        raise OptionError(named(error.option), error.problem) from error
    for group in groups:
        # torch keeps any key of a group, and reads only those that it knows.
        for key in group.options:
            if key not in optimizer.defaults:
                known = ", ".join(optimizer.defaults)
                raise OptionError(f"{named(key)}:", f"{name} has no such option; it takes {known}")
    return optimizer
