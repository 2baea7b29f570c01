"""A recipe's optimizers as one TorchTitan container: who takes which parameter, with which hyperparameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from titan_muon import options, registry
from titan_muon.adam import AdamW
from titan_muon.fsdp.forward_hooks import apply_in_forward, late_applies
from titan_muon.muon import Muon
from titan_muon.tensors.matrices import check_splits
from titan_muon.titan.assign.roles import Seen, see
from titan_muon.titan.assign.rules import Assignment, Default, assign, default_rules, shared_options, splits_with
from titan_muon.titan.device import adamw_implementation
from titan_muon.titan.recipe import Recipe, RecipeError, recipe_error
from titan_muon.titan.recipe.sections import Optimizer as OptimizerSection
from titan_muon.titan.recipe.sections import Rule

registry.optimizers.register("muon", registry.OptimizerEntry(Muon, options.SHARED))
_ADAM = ("foreach", "fused", "state_dtype", "offload")
registry.optimizers.register("adamw", registry.OptimizerEntry(AdamW, _ADAM))


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that one optimizer treats alike.

    Attributes:
        rule: index of the rule that gives them options of its own, or None.
        tag: their name in metrics.
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
        """Rules in order, the defaults or None, and each optimizer's own options."""

        rules: tuple[Rule, ...] = ()
        defaults: tuple[Default, ...] | None = field(default_factory=default_rules)
        tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        offload: options.Offload = "none"
        """What is on the host: the states of all optimizers, or parameters and gradients too."""
        """How Muon's gradients are summed over HSDP's replicas."""
        model: Mapping[str, Seen] | None = None
        """All trained parameters where a process holds a pipeline stage alone; absent, it holds them all."""

    assignments: tuple[Assignment, ...]
    """Who takes which of the parameters here."""
    whole: tuple[Assignment, ...]
    """Who takes which of the whole model's; pipeline ranks have but a part of them."""
    """Parameters whose gradients are on one copy alone and zero on others, with the number of copies."""
    changes: tuple[str, ...] = ()
    """Hyperparameters that differ from those of the checkpoint that was loaded, one line each."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        # TorchTitan's own __init__ is not called: it builds optimizers for each part by itself, and Muon must see all
        # parts at once to plan them together. What it does besides is done at the end.
        self.model_parts = model_parts
        # Canonical: activation checkpointing and torch.compile put their own names in between, and a recipe's globs
        # and a checkpoint must not depend on them.
        trained = {
            canonical_fqn(name): parameter
            for part in model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        seen = see(model_parts, canonical_fqn)
        self.assignments = assignments(config, seen)
        # By the whole model: ranks build Muon together, and one that left it out, or a group of it, because its
        # pipeline stage has nothing for it would leave the others waiting.
        self.whole = assignments(config, seen if config.model is None else config.model)
        every = grouped(config, self.whole)
        self.groups = {name: [_held(group, trained) for group in groups] for name, groups in every.items()}
        tables = held_tables(config, self.whole, trained)
        self.optimizers: list[Optimizer] = [
            _build(name, groups, {"offload": config.offload, **tables.get(name, {})}, trained)
            for name, groups in self.groups.items()
        ]
        self._apply_in_forward()
        taken = [parameter for name in self.groups for parameter in self.parameters(name)]
        self._validate_params(taken)
        self._post_init(taken)

    def _apply_in_forward(self) -> None:
        """Have the model's forward apply what Muon's steps leave to it, if the recipe says so."""
        for muon in self._muons:
            if late_applies(muon) is not None:
                try:
                    apply_in_forward(nn.ModuleList(self.model_parts), muon)
                except ValueError as error:
                    raise recipe_error(error, "muon") from error

    @property
    def _muons(self) -> list[Muon]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Muon)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of every parameter. Hyperparameters stay the recipe's; `changes` says which that changes."""
        recipe = {key: value for key, value in self.state_dict().items() if key.startswith("param_groups.")}
        self.changes = tuple(dict.fromkeys(self._changes(state_dict, recipe)))
        # Before it is loaded, not after: Muon plans for what it loads, and it would plan for the checkpoint's.
        super().load_state_dict({**state_dict, **recipe})

    def _changes(self, saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[str]:
        tags = {name: group.tag for groups in self.groups.values() for group in groups for name in group.names}
        for key, value in recipe.items():
            fqn, _, option = key.removeprefix("param_groups.").rpartition(".")
            # The schedule has moved `lr` on in the checkpoint; `initial_lr` is what the recipe said.
            if option != "lr" and saved[key] != value:
                yield f"{tags[fqn]}.{option.removeprefix('initial_')}: {saved[key]} -> {value}"

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of the optimizer registered as `name`; none if it takes none."""
        named = dict(zip(self.groups, self.optimizers, strict=True))
        groups = named[name].param_groups if name in named else []
        return [parameter for group in groups for parameter in group["params"]]

    def clipped_parameters(self, choice: str) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped under `optimizer.clip = choice`; `adamw` is all but Muon's."""
        # What is not known to be Muon is clipped: an optimizer of another package most likely grows with its gradient
        # as AdamW does, and left alone it would lose the guard that training.max_norm promises.
        spared = {"all": (), "adamw": ("muon",), "none": tuple(self.groups)}[choice]
        return [parameter for name in self.groups if name not in spared for parameter in self.parameters(name)]

    def offload(self) -> None:
        """Keep the states of all optimizers on the host from now on. Raises RecipeError if one cannot."""
        self._move("offload")

    def reload(self) -> None:
        """Keep the states of all optimizers on the device from now on. Raises RecipeError if one cannot."""
        self._move("reload")

    def _move(self, method: str) -> None:
        cannot = [name for name, each in zip(self.groups, self.optimizers, strict=True) if not hasattr(each, method)]
        if cannot:
            raise RecipeError(f"{method}: {', '.join(cannot)} cannot move its states")
        for optimizer in self.optimizers:
            getattr(optimizer, method)()

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Around the last backward before a step: Muon's gathers start in it, if the recipe says so."""
        with ExitStack() as each:
            for muon in self._muons:
                each.enter_context(muon.overlap())
            yield

    def check_last_step(self) -> None:
        """Raise ValueError on all ranks for what was missing or not finite in the last step of Muon."""
        for muon in self._muons:
            muon.check_last_step()

    def set_timeout(self, timeout: timedelta) -> None:
        """Have the collectives of an optimizer's own process groups fail after `timeout`."""
        for muon in self._muons:
            muon.set_timeout(timeout)

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each group now, by its tag."""
        tags = [group.tag for groups in self.groups.values() for group in groups]
        live = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {tag: float(group["lr"]) for tag, group in zip(tags, live, strict=True)}


def optimizer_config(recipe: Recipe, model: Mapping[str, Seen] | None = None) -> HybridOptimizers.Config:
    """The container that a recipe asks for; `model` has all parameters if it is cut into stages.

    Raises RecipeError for an optimizer that is not registered, and for a rule's option that cannot be the rule's own.
    """
    section = recipe.optimizer
    implementation = _implementation(section)
    tables = {
        "muon": _muon_table(recipe),
        "adamw": {**asdict(recipe.adamw), **implementation},
    }
    return HybridOptimizers.Config(
        offload=offload_of(recipe),
        rules=section.rule,
        defaults=default_rules(section.router) if section.defaults else None,
        tables=tables | shared_options(section.rule, tables),
        model=model,
    )


def offload_of(recipe: Recipe) -> options.Offload:
    """What is on the host between steps."""
    # Optimizers see by themselves where parameters are, but not on the CPU, where nothing tells the host from a device.
    return "parameters" if recipe.training.enable_cpu_offload else recipe.optimizer.offload


def _implementation(section: OptimizerSection) -> dict[str, bool]:
    """torch's two flags of AdamW."""
    chosen = adamw_implementation(section.implementation)
    # Both said, also as False: torch reads an absent flag as its own choice, which differs by device.
    return {name: name == chosen for name in ("foreach", "fused")}


def _muon_table(recipe: Recipe) -> dict[str, Any]:
    """Muon's keywords."""
    # By field, not asdict: Muon takes the splits as they are, and asdict would make dicts of them.
    table = {item.name: getattr(recipe.muon, item.name) for item in fields(recipe.muon)}
    gib = table.pop("buffer_gib")
    if recipe.muon.replicas is None:
        table["replicas"] = "redundant" if recipe.placement.muon == "owned" else "split"
    return {**table, "buffer_bytes": None if gib == "auto" else int(gib * 2**30), "machine": recipe.machine}


def assignments(config: HybridOptimizers.Config, seen: Mapping[str, Seen]) -> tuple[Assignment, ...]:
    """Who takes which of the parameters in `seen`: a model's or a pipeline stage's. Raises as the container does."""
    assigned = assign(seen if config.model is None else config.model, config.rules, config.defaults)
    by_default = [a for a in assigned if a.rule is None]
    # A model whose names or shapes the defaults do not know would otherwise train on AdamW alone, without a word.
    if by_default and not any(a.optimizer == "muon" for a in assigned):
        raise RecipeError(
            "optimizer.rule: Muon takes no parameter of this model. If that is meant, say so with a last rule "
            "(match = '*', optimizer = 'adamw'); if not, correct the rules"
        )
    return tuple(a for a in assigned if a.fqn in seen)


def held_tables(
    config: HybridOptimizers.Config, whole: tuple[Assignment, ...], held: Collection[str]
) -> Mapping[str, Mapping[str, Any]]:
    """Options of all optimizers where a process holds the parameters `held`: with the splits of known layouts, and
    without those of other pipeline ranks'.

    Raises RecipeError for a split that matches no Muon parameter of the whole model.
    """
    said = config.tables.get("muon", {}).get("split", ())
    taken = [a for a in whole if a.optimizer == "muon"]
    # Muon itself refuses a split that matches nothing, and knows nothing of what other pipeline ranks have.
    if config.model is not None:
        try:
            check_splits([a.fqn for a in taken], said)
        except ValueError as error:
            raise recipe_error(error) from error
    here = [a for a in taken if a.fqn in held]
    splits = splits_with(said, here)
    if config.model is not None:
        splits = tuple(split for split in splits if any(fnmatch.fnmatchcase(a.fqn, split.match) for a in here))
    if splits == said:
        return config.tables
    return {**config.tables, "muon": {**config.tables.get("muon", {}), "split": splits}}


def grouped(config: HybridOptimizers.Config, assigned: tuple[Assignment, ...]) -> dict[str, list[ParamGroup]]:
    """Groups of equal options by optimizer: one for the defaults, one for each rule that has options of its own."""
    names: dict[str, dict[int | None, list[str]]] = {}
    for name in dict.fromkeys(a.optimizer for a in assigned):
        _check_offload(config, name)
    for a in assigned:
        # Rules without options share the group of the defaults: fewer groups are fewer foreach calls in a step.
        rule = a.rule if a.rule is not None and config.rules[a.rule].options else None
        names.setdefault(a.optimizer, {}).setdefault(rule, []).append(a.fqn)
    return {
        optimizer: [_group(config, optimizer, rule, fqns) for rule, fqns in by_rule.items()]
        for optimizer, by_rule in names.items()
    }


def _group(config: HybridOptimizers.Config, optimizer: str, index: int | None, fqns: list[str]) -> ParamGroup:
    table, shared = config.tables.get(optimizer, {}), registry.optimizers.get(optimizer).shared
    own = {} if index is None else config.rules[index].options
    hyperparameters = {key: value for key, value in {**table, **own}.items() if key not in shared}
    tag = optimizer if index is None else f"{optimizer}/{config.rules[index].match}"
    return ParamGroup(optimizer, index, tag, tuple(fqns), hyperparameters)


def _held(group: ParamGroup, trained: Mapping[str, nn.Parameter]) -> ParamGroup:
    return replace(group, names=tuple(name for name in group.names if name in trained))


def _check_offload(config: HybridOptimizers.Config, name: str) -> None:
    # Where parameters are on the host, so are the states of any optimizer.
    if config.offload != "state" or "offload" in registry.optimizers.get(name).shared:
        return
    able = ", ".join(n for n in registry.optimizers.names() if "offload" in registry.optimizers.get(n).shared)
    said = f'optimizer.offload = "{config.offload}": {name} keeps its states on the device'
    raise RecipeError(f'{said}; set "none", or give its parameters to one of {able}')


def _build(
    name: str, groups: list[ParamGroup], table: Mapping[str, Any], trained: Mapping[str, nn.Parameter]
) -> Optimizer:
    """The optimizer `name`. Raises RecipeError for an option that it refuses, or does not know."""
    built = [
        {**group.options, "params": [trained[n] for n in group.names], "param_names": list(group.names)}
        for group in groups
    ]
    try:
        optimizer: Optimizer = registry.optimizers.get(name).build(built, **registry.shared_options(name, table))
        if isinstance(optimizer, Muon):
            # Here, not in the first step: a plan that cannot be made ends the start of a run.
            optimizer.build()
    except options.OptionError as error:
        rule = next((group.rule for group in groups if group.rule is not None and error.option in group.options), None)
        raise recipe_error(error, name if rule is None else f"optimizer.rule[{rule}].options") from error
    for group in groups:
        place = name if group.rule is None else f"optimizer.rule[{group.rule}].options"
        # torch keeps any key of a group and never reads those that it does not know.
        for key in group.options:
            if key not in optimizer.defaults:
                raise RecipeError(f"{place}.{key}: {name} has no such option; it takes {', '.join(optimizer.defaults)}")
    return optimizer
