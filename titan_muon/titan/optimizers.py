"""A recipe's optimizers as one TorchTitan container: who takes which parameter, with which hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from titan_muon import registry
from titan_muon.options import Link, Split
from titan_muon.titan.recipe import Recipe, RecipeError, sections
from titan_muon.titan.rules import Assignment, Rule, assign, default_rules


@dataclass(frozen=True)
class Group:
    """Parameters that one optimizer treats alike.

    Attributes:
        rule: index of the rule that gives them options of its own, or None.
        tag: names them in metrics.
        options: their hyperparameters.
    """

    optimizer: str
    rule: int | None
    tag: str
    names: tuple[str, ...]
    options: Mapping[str, Any]


class HybridOptimizers(OptimizersContainer):
    """Optimizers by name, each with the parameters of all model parts that the recipe's rules or the defaults give it.

    Raises RecipeError for a rule that takes nothing, a parameter that nothing takes, an unknown optimizer or option,
    and for a model without any Muon parameter unless rules say so for each parameter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Rules in order, their options, the defaults or None, and each optimizer's own options."""

        rules: tuple[Rule, ...] = ()
        rule_options: tuple[Mapping[str, Any], ...] = ()
        defaults: tuple[Rule, ...] | None = field(default_factory=default_rules)
        tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        whole_model: bool = True
        """Whether this process holds the whole model; a pipeline stage may lack what a rule is for."""

    assignments: tuple[Assignment, ...]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        trained = {
            canonical_fqn(name): parameter
            for part in model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self.assignments = assignments(config, {name: tuple(p.shape) for name, p in trained.items()})
        self.groups = grouped(config, self.assignments)
        self.optimizers: list[Optimizer] = [
            _build(name, groups, config.tables.get(name, {}), trained) for name, groups in self.groups.items()
        ]
        taken = [parameter for name in self.groups for parameter in self.parameters(name)]
        self._validate_params(taken)
        self._post_init(taken)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of the optimizer registered as `name`; none if it takes none."""
        named = dict(zip(self.groups, self.optimizers, strict=True))
        groups = named[name].param_groups if name in named else []
        return [parameter for group in groups for parameter in group["params"]]

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each group now, by its tag."""
        tags = [group.tag for groups in self.groups.values() for group in groups]
        live = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {tag: float(group["lr"]) for tag, group in zip(tags, live, strict=True)}


def optimizer_config(recipe: Recipe) -> HybridOptimizers.Config:
    """The container that a recipe asks for.

    Raises RecipeError for an optimizer that is not registered, and for a rule's option that cannot be the rule's own.
    """
    section = recipe.optimizer
    implementation = {"foreach": False, "fused": False}
    if section.implementation == "auto":
        implementation["fused" if torch.accelerator.is_available() else "foreach"] = True
    elif section.implementation != "for-loop":
        implementation[section.implementation] = True
    tables = {
        "muon": _muon_table(recipe.muon, recipe.link),
        "adamw": {**asdict(recipe.adamw), **implementation},
        "adam": {**asdict(recipe.adam), **implementation},
    }
    return HybridOptimizers.Config(
        rules=tuple(Rule(r.match, r.optimizer, f"optimizer.rule[{i}] {r.match!r}") for i, r in enumerate(section.rule)),
        rule_options=tuple(rule.options for rule in section.rule),
        defaults=default_rules(section.router) if section.defaults else None,
        tables=_with_shared(tables, section.rule),
        whole_model=recipe.parallelism.pipeline_parallel_degree == 1,
    )


def _with_shared(tables: dict[str, dict[str, Any]], rules: tuple[sections.Rule, ...]) -> dict[str, dict[str, Any]]:
    """`tables`, and one for each other optimizer with what holds for all of it, on which its rules must agree."""
    agreed: dict[str, dict[str, Any]] = {}
    for index, rule in enumerate(rules):
        name, place = rule.optimizer, f"optimizer.rule[{index}]"
        try:
            entry = registry.optimizers.get(name)
        except ValueError as error:
            raise RecipeError(f"{place}.{error}") from error
        for key in (key for key in rule.options if key in entry.shared):
            value = rule.options[key]
            said = f"{place}.options.{key}: {key} holds for all of {name}"
            if name in tables:
                raise RecipeError(f"{said}; set {name}.{key}")
            if agreed.setdefault(name, {}).setdefault(key, value) != value:
                raise RecipeError(f"{said}, and an earlier rule says {agreed[name][key]!r}; make them equal")
    return {**tables, **agreed}


def _muon_table(section: sections.Muon, link: sections.Link) -> dict[str, Any]:
    table = asdict(section)
    gib = table.pop("buffer_gib")
    return {
        **table,
        "buffer_bytes": None if gib == "auto" else int(gib * 2**30),
        "split": tuple(Split(**asdict(split)) for split in section.split),
        "link": Link(**asdict(link)),
    }


def assignments(config: HybridOptimizers.Config, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Assignment, ...]:
    """Who takes which parameter of a model, or of a pipeline stage. Raises RecipeError as the container does."""
    try:
        assigned = assign(shapes.items(), config.rules, config.defaults, all_rules=config.whole_model)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    by_default = [a for a in assigned if a.rule is None]
    if config.whole_model and by_default and not any(a.optimizer == "muon" for a in assigned):
        raise RecipeError(
            "optimizer.rule: Muon takes no parameter of this model. If that is meant, say so with a last rule "
            "(match = '*', optimizer = 'adamw'); if not, correct the rules"
        )
    return assigned


def grouped(config: HybridOptimizers.Config, assigned: tuple[Assignment, ...]) -> dict[str, list[Group]]:
    """Groups of equal options by optimizer: one for the defaults, one for each rule that has options of its own."""
    names: dict[str, dict[int | None, list[str]]] = {}
    for a in assigned:
        rule = a.rule if a.rule is not None and config.rule_options[a.rule] else None
        names.setdefault(a.optimizer, {}).setdefault(rule, []).append(a.fqn)
    return {
        optimizer: [_group(config, optimizer, rule, fqns) for rule, fqns in by_rule.items()]
        for optimizer, by_rule in names.items()
    }


def _group(config: HybridOptimizers.Config, optimizer: str, rule: int | None, fqns: list[str]) -> Group:
    table, shared = config.tables.get(optimizer, {}), registry.optimizers.get(optimizer).shared
    own = {} if rule is None else config.rule_options[rule]
    options = {key: value for key, value in {**table, **own}.items() if key not in shared}
    tag = optimizer if rule is None else f"{optimizer}/{config.rules[rule].match}"
    return Group(optimizer, rule, tag, tuple(fqns), options)


def _build(name: str, groups: list[Group], table: Mapping[str, Any], trained: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer `name`. Raises RecipeError for an option that it does not know: torch takes any without a word."""
    built = [
        {**group.options, "params": [trained[n] for n in group.names], "param_names": list(group.names)}
        for group in groups
    ]
    optimizer: Optimizer = registry.optimizers.get(name).build(built, **registry.shared_options(name, table))
    for group in groups:
        place = name if group.rule is None else f"optimizer.rule[{group.rule}].options"
        for key in group.options:
            if key not in optimizer.defaults:
                raise RecipeError(f"{place}.{key}: {name} has no such option; it takes {', '.join(optimizer.defaults)}")
    return optimizer
