"""Parameter groups and construction of optimizers."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .. import options, registry
from ..adam import AdamW
from ..muon import Muon
from ..options import Offload, OptionError, Rule, Split
from ..tensors.matrices import check_splits, has_matrices
from ..tensors.names import canonical_fqn
from ..tensors.warning import warn
from .roles import Seen, see
from .rules import Assignment, Default, assign_parameters, default_rules, splits_with

registry.optimizers.register("muon", registry.OptimizerEntry(Muon, options.SHARED))
registry.optimizers.register(
    "adamw", registry.OptimizerEntry(AdamW, ("foreach", "fused", "state_dtype", "offload", "missing_grad", "nonfinite"))
)

OPTIMIZER = "optimizer"
"""Key of a parameter group: the name of the optimizer that updates the group."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of an optimizer with equal hyperparameters.

    `rule`: index of their rule. `tag`: name in metrics. `spared`: vectors without weight decay.
    """

    optimizer: str
    rule: int | None
    tag: str
    names: tuple[str, ...]
    options: Mapping[str, Any]
    spared: bool = False

    def of_torch(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**self.options, "params": [parameters[n] for n in self.names], "param_names": list(self.names)}


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
    model: nn.Module | Iterable[nn.Module], rules: Sequence[Rule] = (), *, defaults: bool = True, router: str = "adamw"
) -> tuple[Assignment, ...]:
    """The optimizer of each trained parameter, with the reason. Parameters may be on the meta device.

    Arguments and errors as in `Hybrid`.
    """
    modules = modules_of(model)
    seen, frozen = see(modules, canonical_fqn, frozen=True), frozen_in(modules)
    assigned = assigned_model(seen, rules, default_rules(router) if defaults else None, frozen)
    return tuple(a for a in assigned if a.fqn not in frozen)


def parameter_groups(
    model: nn.Module | Iterable[nn.Module],
    rules: Sequence[Rule] = (),
    *,
    defaults: bool = True,
    router: str = "adamw",
    decay_vectors: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups by optimizer, for separate optimizers in place of a `Hybrid`.

    `Muon(groups["muon"])` and `titan_muon.adam.AdamW(groups["adamw"])` take steps as `Hybrid(model)`, and exchange
    checkpoints with a `Hybrid` and with recipes by torch.distributed.checkpoint. Weights with known fused layouts have
    an `Assignment.split`: pass `Muon` the splits, as the warning says.

    Returns:
        Groups with `params`, `param_names`, `optimizer`, and the options of a rule.

    Arguments and errors as in `Hybrid`.
    """
    modules = modules_of(model)
    seen, frozen = see(modules, canonical_fqn, frozen=True), frozen_in(modules)
    assigned = assigned_model(seen, rules, default_rules(router) if defaults else None, frozen)
    parameters = named_parameters_of(modules)
    if fused := [a.fqn for a in assigned if a.optimizer == "muon" and a.split is not None]:
        warn(
            f"{fused[0]}{f' and {len(fused) - 1} more' if len(fused) > 1 else ''}: several matrices in a weight; pass "
            "Muon split=[a.split for a in assign(model, rules) if a.split and a.optimizer == 'muon']"
        )
    groups = grouped(rules, {}, assigned, decay_vectors=decay_vectors)
    return {name: [group.of_torch(parameters) | {OPTIMIZER: name} for group in groups[name]] for name in groups}


def named_parameters_of(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """All parameters, by canonical name."""
    return {canonical_fqn(name): parameter for part in parts for name, parameter in part.named_parameters()}


def frozen_in(parts: Iterable[nn.Module]) -> frozenset[str]:
    """Canonical names of the parameters without gradients."""
    return frozenset(name for name, p in named_parameters_of(parts).items() if not p.requires_grad)


def assigned_model(
    parameters: Mapping[str, Seen],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    frozen: Collection[str] = (),
    *,
    is_part: bool = False,
) -> tuple[Assignment, ...]:
    """As `assign_parameters`, for all `parameters`, also the `frozen`.

    Raises OptionError also if Muon trains no parameter although defaults apply to some, unless other ranks may hold
    further parts of the model (`is_part`).
    """
    assigned = assign_parameters(parameters, rules, defaults)
    trained = [a for a in assigned if a.fqn not in frozen]
    by_default = [a for a in trained if a.rule is None]
    # A model with unknown names or shapes would otherwise train with AdamW alone.
    if (by_default or not trained) and not any(a.optimizer == "muon" for a in trained) and not is_part:
        roles: dict[str, int] = {}
        for a in trained:
            roles[a.role or a.reason] = roles.get(a.role or a.reason, 0) + 1
        counts = ", ".join(f"{count} {role}" for role, count in roles.items()) or "none needs a gradient"
        match = "(match = '*lora_*', optimizer = 'muon')" if "lora" in roles else "with optimizer = 'muon'"
        raise OptionError(
            "rules:",
            f"Muon takes no parameter of this model ({counts}); add a rule {match}, or confirm with a last rule "
            "(match = '*', optimizer = 'adamw')",
        )
    return assigned


def grouped(
    rules: Sequence[Rule],
    tables: Mapping[str, Mapping[str, Any]],
    assigned: Sequence[Assignment],
    *,
    decay_vectors: bool,
) -> dict[str, list[ParamGroup]]:
    """Groups by optimizer: one for the defaults, and one for each rule with options.

    Unless `decay_vectors`, vectors have a group without weight decay, except where a rule sets `weight_decay`.
    """
    names: dict[str, dict[tuple[int | None, bool], list[str]]] = {}
    for a in assigned:
        # Each further group would cost foreach calls in a step.
        rule = a.rule if a.rule is not None and rules[a.rule].options else None
        of_rule = {} if rule is None else rules[rule].options
        # parameter_groups() has no tables, and AdamW's default decays.
        decays = a.optimizer == "adamw" or "weight_decay" in tables.get(a.optimizer, {})
        spared = (
            decays and a.optimizer != "muon" and a.is_vector and not decay_vectors and "weight_decay" not in of_rule
        )
        names.setdefault(a.optimizer, {}).setdefault((rule, spared), []).append(a.fqn)
    groups: dict[str, list[ParamGroup]] = {}
    for optimizer, by_rule in names.items():
        shared = registry.optimizers.get(optimizer).shared
        for (rule, spared), fqns in by_rule.items():
            merged = {**tables.get(optimizer, {}), **({} if rule is None else rules[rule].options)}
            if spared:
                merged["weight_decay"] = 0.0
            hyperparameters = {key: value for key, value in merged.items() if key not in shared}
            tag = optimizer if rule is None else f"{optimizer}/{rules[rule].match}"
            group = ParamGroup(optimizer, rule, tag, tuple(fqns), hyperparameters, spared)
            groups.setdefault(optimizer, []).append(group)
    return groups


def with_known_splits(
    tables: Mapping[str, Mapping[str, Any]],
    whole: Sequence[Assignment],
    parameters: Collection[str],
    *,
    is_stage: bool = False,
) -> Mapping[str, Mapping[str, Any]]:
    """The optimizers' tables, with the splits of known fused layouts in Muon's table.

    `parameters`: of this process. `is_stage`: leaves out splits of remote pipeline stages. Raises ValueError for a
    split without a Muon parameter in the model.
    """
    splits: tuple[Split, ...] = tuple(tables.get("muon", {}).get("split", ()))
    muon = [a for a in whole if a.optimizer == "muon"]
    local = [a for a in muon if a.fqn in parameters]
    all_splits = splits_with(splits, local)
    if is_stage:
        # Muon refuses an unmatched split and does not know the remaining stages.
        check_splits([a.fqn for a in muon], splits)
        all_splits = tuple(s for s in all_splits if any(fnmatch.fnmatchcase(a.fqn, s.match) for a in local))
    if all_splits == splits:
        return tables
    return {**tables, "muon": {**tables.get("muon", {}), "split": all_splits}}


def check_offload(offload: Offload, optimizer: str) -> None:
    """Raise OptionError if `offload` asks for host states from an optimizer with device states."""
    if offload != "state" or "offload" in registry.optimizers.get(optimizer).shared:
        return
    offloading = [n for n in registry.optimizers.names() if "offload" in registry.optimizers.get(n).shared]
    raise OptionError(
        "offload",
        f'= "{offload}": {optimizer} keeps its states on the device; set "none", or give its parameters to one of '
        f"{', '.join(offloading)}",
    )


@dataclass(frozen=True)
class Decision:
    """The optimizer of each trained parameter of the `whole` model, and this process's groups and options (`tables`).

    Groups have the frozen parameters too.
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
    is_part: bool = False,
    decay_vectors: bool = False,
    frozen: Collection[str] = (),
) -> Decision:
    """Choose the optimizer of each parameter of `model`, and the groups of `parameters`, the names of this process.

    `defaults`: None if rules decide for every parameter. `tables`: options by optimizer. `is_stage`: whether this
    process holds a pipeline stage, and `model` all stages. `is_part`: as in `assigned_model`. `frozen`: names.

    Raises:
        OptionError: for a rule without parameters, an undecided parameter, and an unknown optimizer.
        ValueError: for a split without a Muon parameter.
    """
    # From the whole model, because all ranks build Muon together: ranks would wait for a pipeline rank without Muon.
    assigned = assigned_model(model, rules, defaults, frozen, is_part=is_part)
    _check_matrices(assigned, rules, tables.get("muon", {}).get("split", ()))
    groups = {}
    for name, whole_groups in grouped(rules, tables, assigned, decay_vectors=decay_vectors).items():
        check_offload(offload, name)
        groups[name] = tuple(replace(g, names=tuple(n for n in g.names if n in parameters)) for g in whole_groups)
    if is_part:
        # Every rank builds Muon, also a rank without matrices.
        groups.setdefault("muon", (ParamGroup("muon", None, "muon", (), {}),))
    whole = tuple(a for a in assigned if a.fqn not in frozen)
    return Decision(whole, groups, with_known_splits(tables, assigned, parameters, is_stage=is_stage))


def _check_matrices(assigned: Iterable[Assignment], rules: Sequence[Rule], splits: Sequence[Split]) -> None:
    """Raise OptionError for a rule that gives Muon a parameter without matrices."""
    for a in assigned:
        if a.optimizer == "muon" and a.rule is not None and not has_matrices(a.fqn, a.shape, splits):
            raise OptionError(
                f"rules[{a.rule}]",
                f"(match = {rules[a.rule].match!r}) gives Muon {a.fqn} of shape {a.shape}, and Muon takes matrices "
                "(2D) and stacks of matrices (3D); narrow the match, or describe the matrices by muon.split and dims",
            )


def built(
    name: str, groups: Sequence[ParamGroup], table: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> Optimizer:
    """The optimizer `name` with these groups; `table`: its options.

    Raises OptionError for an invalid or unknown option; for an option of a rule, `option` is `rules[i].options.KEY`.
    """
    dicts = [group.of_torch(parameters) for group in groups]
    of_rule = {key: group.rule for group in groups if group.rule is not None for key in group.options}
    rule_keys = {key: index for key, index in of_rule.items() if key not in table}

    def named(key: str) -> str:
        if key in rule_keys:
            return f"rules[{rule_keys[key]}].options.{key}"
        return key if name == "muon" else f"{name}.{key}"

    try:
        with warnings.catch_warnings():
            # The caller warns about the whole model, with the roles of parameters.
            warnings.simplefilter("ignore")
            optimizer: Optimizer = registry.optimizers.get(name).build(dicts, **registry.shared_options(name, table))
    except OptionError as error:
        raise OptionError(named(error.option), error.problem) from error
    for group in groups:
        # torch silently keeps unknown keys of a group.
        for key in group.options:
            if key not in optimizer.defaults:
                known = ", ".join(optimizer.defaults)
                raise OptionError(f"{named(key)}:", f"{name} has no such option; it takes {known}")
    return optimizer
