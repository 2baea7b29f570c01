"""A recipe's optimizers as one TorchTitan container: who takes which parameter, with which hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_muon import options, registry
from titan_muon.assignment.roles import Seen
from titan_muon.assignment.rules import Default, default_rules
from titan_muon.fsdp.forward_hooks import apply_in_forward, late_applies
from titan_muon.hybrid import OfParts, parts_of
from titan_muon.options import Rule
from titan_muon.titan.device import adamw_implementation
from titan_muon.titan.recipe import Recipe, RecipeError, recipe_error
from titan_muon.titan.recipe.sections import Optimizer as OptimizerSection


class HybridOptimizers(OfParts, OptimizersContainer):
    """A recipe's optimizers by name, each with the parameters of all model parts that rules and defaults give it.

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
        """Tensors on the host: the states of all optimizers, or parameters and gradients too."""
        model: Mapping[str, Seen] | None = None
        """All trained parameters where a process holds a pipeline stage alone; absent, it holds them all."""

    changes: tuple[str, ...] = ()
    """Hyperparameters that differ from those of the checkpoint that was loaded, one line each."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        # TorchTitan's own __init__ is not called: it builds optimizers for each part by itself, and Muon must see all
        # parts at once to plan them together. Its other duties are done at the end.
        self.model_parts = model_parts
        try:
            self.parts = parts_of(
                model_parts,
                config.rules,
                config.defaults,
                config.tables,
                offload=config.offload,
                model=config.model,
            )
        except ValueError as error:
            raise recipe_error(error) from error
        self.optimizers = list(self.parts.optimizers.values())
        try:
            for muon in self._muons:
                # Here, not in the first step: a plan that cannot be made ends the start of a run.
                muon.build()
                if late_applies(muon) is not None:
                    apply_in_forward(nn.ModuleList(model_parts), muon)
        except ValueError as error:
            raise recipe_error(error) from error
        parameters = [parameter for name in self.parts.groups for parameter in self.parameters(name)]
        self._validate_params(parameters)
        self._post_init(parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of every parameter. Hyperparameters stay the recipe's; `changes` lists the differences."""
        recipe = {key: value for key, value in self.state_dict().items() if key.startswith("param_groups.")}
        self.changes = tuple(dict.fromkeys(self._changes(state_dict, recipe)))
        # The schedule has moved `lr` on in the checkpoint, and TorchTitan's scheduler does not set it at a load.
        kept = {key: value for key, value in recipe.items() if not key.endswith(".lr") or key not in state_dict}
        # Before the load, not after: Muon plans for the hyperparameters that it loads.
        super().load_state_dict({**state_dict, **kept})

    def _changes(self, saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[str]:
        tags = {name: group.tag for groups in self.parts.groups.values() for group in groups for name in group.names}
        for key, value in recipe.items():
            fqn, _, option = key.removeprefix("param_groups.").rpartition(".")
            # The schedule has moved `lr` on in the checkpoint; `initial_lr` is what the recipe said.
            old = saved.get(key, "not an option then")
            if option != "lr" and old != value:
                yield f"{tags[fqn]}.{option.removeprefix('initial_')}: {old} -> {value}"

    def clipped_parameters(self, choice: str) -> list[Tensor]:
        """The parameters whose gradients are clipped under `optimizer.clip = choice`; `adamw` is all but Muon's."""
        # What is not known to be Muon is clipped: an optimizer of another package most likely grows with its gradient
        # as AdamW does, and left alone it would lose the guard that training.max_norm promises.
        spared = {"all": (), "adamw": ("muon",), "none": tuple(self.parts.groups)}[choice]
        return [parameter for name in self.parts.groups if name not in spared for parameter in self.parameters(name)]


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


def shared_options(rules: tuple[Rule, ...], tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What holds for all of each optimizer that has no table in the recipe; its rules must agree on that."""
    agreed: dict[str, dict[str, Any]] = {}
    for index, rule in enumerate(rules):
        name, place = rule.optimizer, f"optimizer.rule[{index}]"
        try:
            shared = registry.optimizers.get(name).shared
        except ValueError as error:
            raise RecipeError(f"{place}.{error}") from error
        for key, value in rule.options.items():
            # What the recipe alone has in Muon's table the registry does not know.
            if key not in shared and (name != "muon" or key != "buffer_gib"):
                continue
            said = f"{place}.options.{key}: {key} holds for all of {name}"
            if name in tables:
                raise RecipeError(f"{said}; set {name}.{key}")
            if agreed.setdefault(name, {}).setdefault(key, value) != value:
                raise RecipeError(f"{said}, and an earlier rule says {agreed[name][key]!r}; make them equal")
    return agreed
