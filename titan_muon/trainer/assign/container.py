"""A recipe's optimizers as a TorchTitan container."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from titan_muon import options
from titan_muon.assignment.optimizer_set import ForwardsToParts, OptimizerSet, build_optimizers
from titan_muon.assignment.options import Rule
from titan_muon.assignment.roles import ParameterInfo, inspect_model
from titan_muon.assignment.table import parameter_table
from titan_muon.engine.exchange.agreement import Agreement
from titan_muon.engine.layout.types import Plan
from titan_muon.engine.orthogonalize import iteration
from titan_muon.engine.tensors.names import canonical_fqn
from titan_muon.engine.tensors.storage import STEP
from titan_muon.features.replica_check import check_equal
from titan_muon.forecast.lines import plan_lines
from titan_muon.kernels.dispatch import Dispatch
from titan_muon.planner.summary import summarize
from titan_muon.plugins.forward_hooks import apply_in_forward, forward_updates
from titan_muon.selection import algorithm_of
from titan_muon.trainer.device import adamw_implementation
from titan_muon.trainer.recipe import Recipe, RecipeError, as_recipe_errors

logger = logging.getLogger(__name__)

RULES = "rules, such as rules=(Rule(match='*.bias', optimizer='adamw', options={'lr': 1e-3}),)"


class HybridOptimizers(ForwardsToParts, OptimizersContainer):
    """A recipe's optimizers by name.

    Raises RecipeError for rules without a match, unassigned parameters, unknown optimizers or options, and a model
    without Muon parameters unless rules assign every parameter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Rules in order, the defaults, and each optimizer's options; `rules`, `defaults`, `router` as in `Hybrid`."""

        rules: tuple[Rule, ...] = ()
        defaults: bool = True
        router: str = "adamw"
        tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        decay_vectors: bool = False
        """Whether norms, biases and other vectors have weight decay."""
        offload: options.Offload = "none"
        """Tensors on the host: all optimizer states, or also parameters and gradients."""
        report: bool = True
        """Log the table of parameters and Muon's plan, on rank 0."""
        model: Mapping[str, ParameterInfo] | None = None
        """All trained parameters, if this process has only a pipeline stage. None: gathered from all ranks."""

    changes: tuple[str, ...] = ()
    """Hyperparameters different from the loaded checkpoint's, a line each."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        # TorchTitan's __init__ builds optimizers per part, and Muon plans all parts together.
        self.model_parts = model_parts
        agreement = Agreement()
        # A pipeline stage needs the names of all stages, and TorchTitan's own configuration has none.
        stages = agreement.distinct(inspect_model(model_parts)) if config.model is None else []
        joined = {name: seen for stage in stages for name, seen in stage.items()} if len(stages) > 1 else config.model
        with as_recipe_errors():
            self.parts = agreement.raise_on_all_ranks(lambda: parts_of_config(config, model_parts, joined))
            self.optimizers = list(self.parts.optimizers.values())
            self._share_report()
            for muon in self._muons:
                # Now, so that errors come early.
                muon.build()
                if forward_updates(muon) is not None:
                    apply_in_forward(nn.ModuleList(model_parts), muon)
        parameters = [parameter for name in self.parts.groups for parameter in self.parameters(name)]
        self._validate_params(parameters)
        self._post_init(parameters)
        if config.report and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info("%s", self)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This process's parameters by name."""
        return {canonical_fqn(name): p for part in self.model_parts for name, p in part.named_parameters()}

    @property
    def plan(self) -> Plan | None:
        """Muon's plan. None for a pipeline stage without matrices, whose Muon only takes part in agreements."""
        return next((muon.plan for muon in self._muons if muon.plan.matrices), None)

    def __repr__(self) -> str:
        plan = self.plan
        lines = plan_lines(plan, None if plan is None else summarize(plan))
        return "\n".join([parameter_table(self.assignments, self.named_parameters, plan, full=False), *lines])

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As torchtitan's. One flag skips the step of all optimizers."""
        self._prepare_parts()
        super().step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load all states. Hyperparameters stay the recipe's; `changes` lists the differences."""
        recipe = {key: value for key, value in self.state_dict().items() if key.startswith("param_groups.")}
        tags = {name: group.tag for groups in self.parts.groups.values() for group in groups for name in group.names}
        changes, current = dict[str, None](), dict[str, Any]()
        for key, value in recipe.items():
            fqn, _, option = key.removeprefix("param_groups.").rpartition(".")
            old = state_dict.get(key, "not an option then")
            # The schedule has changed `lr`, and TorchTitan's scheduler does not set it on loading; `initial_lr` is the
            # recipe's. The number of steps is a state.
            is_state = option in ("lr", STEP)
            if not is_state or key not in state_dict:
                current[key] = value
            if not is_state and old != value:
                changes[f"{tags[fqn]}.{option.removeprefix('initial_')}: {old} -> {value}"] = None
        self.changes = tuple(changes)
        # Muon plans for the loaded hyperparameters.
        super().load_state_dict({**state_dict, **current})

    def check_replicas(self, own: Iterable[str] = ()) -> None:
        """As `Hybrid.check_replicas`, and for the saved buffers of the model, such as the load-balancing bias."""
        super().check_replicas(own)
        check_equal({}, Agreement(), buffers=saved_buffers(self.model_parts))

    def clipped_parameters(self, choice: str) -> list[Tensor]:
        """Parameters clipped under `optimizer.clip = choice`; `adamw`: all but Muon's."""
        # Other packages' updates probably grow with the gradient, like AdamW's.
        spared = {"all": (), "adamw": ("muon",), "none": tuple(self.parts.groups)}[choice]
        return [parameter for name in self.parts.groups if name not in spared for parameter in self.parameters(name)]


def saved_buffers(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of the buffers in the model's state dict. Replicas become plain tensors.

    A buffer is replicated on all ranks of its pipeline stage, and the mesh of a DTensor may have tensor-parallel ranks
    alone.
    """
    for part in model_parts:
        parameters = {canonical_fqn(name) for name, _ in part.named_parameters(remove_duplicate=False)}
        for name, value in part.state_dict().items():
            if canonical_fqn(name) not in parameters and isinstance(value, Tensor):
                if isinstance(value, DTensor) and all(p.is_replicate() for p in value.placements):
                    value = value.to_local()
                yield canonical_fqn(name), value


def parts_of_config(
    config: HybridOptimizers.Config, model_parts: Sequence[nn.Module], model: Mapping[str, ParameterInfo] | None
) -> OptimizerSet:
    """The optimizers of a configuration. Raises ValueError as `build_optimizers`. `model`: as in `Config`."""
    options: dict[str, Any] = {"offload": config.offload, "decay_vectors": config.decay_vectors}
    return build_optimizers(model_parts, config.rules, router_of(config), _tables(config), model=model, **options)


def router_of(config: HybridOptimizers.Config) -> str | None:
    """As in `assign_parameters`."""
    return config.router if config.defaults else None


def _tables(config: HybridOptimizers.Config) -> Mapping[str, Mapping[str, Any]]:
    """Each optimizer's options, with TorchTitan's `implementation` for AdamW unless the table has a choice.

    Raises ValueError for unread fields of TorchTitan's configuration.
    """
    check_unread_fields(config)
    adamw = config.tables.get("adamw", {})
    if {"foreach", "fused", "state_dtype"} & adamw.keys():
        return config.tables
    # A form of TorchTitan's slot lacks the field.
    return {**config.tables, "adamw": {**adamw, **_flags(getattr(config, "implementation", "auto"))}}


def check_unread_fields(config: Any) -> None:
    """Raise ValueError for a field of TorchTitan's own that HybridOptimizers does not read.

    The installed form of the slot lacks some of the fields.
    """
    unread: dict[str, str] = {}
    if getattr(config, "param_groups", ()):
        unread["param_groups"] = RULES
    if named := getattr(config, "optimizer_factory_kwargs_by_name", ()):
        unread[f"optimizer_factory_kwargs_by_name ({', '.join(named)})"] = "tables"
    if typed := getattr(config, "optimizers", ()):
        names = ", ".join(type(optimizer).__qualname__ for optimizer in typed)
        unread[f"optimizers ({names})"] = f"{RULES}, and each optimizer's options in tables"
    if getattr(config, "implementation", None) == "fused_opt_states_bf16":
        unread["implementation = 'fused_opt_states_bf16'"] = "tables={'adamw': {'state_dtype': 'bfloat16'}}"
    for name, instead in unread.items():
        raise ValueError(f"{name} is not read by HybridOptimizers; write {instead}")


def _flags(option: str) -> dict[str, bool]:
    chosen = adamw_implementation(option)
    return {name: name == chosen for name in ("foreach", "fused")}


def optimizer_config(recipe: Recipe, model: Mapping[str, ParameterInfo] | None = None) -> HybridOptimizers.Config:
    """Container configuration of a recipe; `model`: all parameters under pipeline parallelism."""
    section = recipe.optimizer
    for index, rule in enumerate(section.rule):
        if rule.optimizer == "muon":
            _check_muon_options(recipe, rule.options, f"optimizer.rule[{index}].options")
    adamw = asdict(recipe.adamw) | _flags(section.implementation)
    return HybridOptimizers.Config(
        # A run prints more, once it has a folder.
        report=False,
        # Not detected from parameters: on the CPU, host and device are the same.
        offload="parameters" if recipe.training.enable_cpu_offload else section.offload,
        decay_vectors=section.decay_vectors,
        rules=section.rule,
        defaults=section.defaults,
        router=section.router,
        tables={"muon": _muon_table(recipe), "adamw": adamw},
        model=model,
    )


def _check_muon_options(recipe: Recipe, of_rule: Mapping[str, Any], place: str) -> None:
    """Raise RecipeError for coefficients and algorithms of a rule, which Muon would call its own."""
    if of_rule.keys().isdisjoint(("algorithm", "ns_coefficients", "ns_steps")):
        return
    table = {**vars(recipe.muon), **vars(recipe.muon.expert), **of_rule}
    with as_recipe_errors():
        dispatch = Dispatch(table["orthogonalize"], table["ns_dtype"])
    try:
        chosen = iteration(table["ns_coefficients"], table["ns_steps"], table["eps"])
        # Raises for coefficients without a margin for rounding, which a matrix of any size has or lacks.
        dispatch.choose(1, 1, chosen.steps)
        algorithm_of(options.MuonOptions(**{name: value for name, value in table.items() if name != "expert"}))
    except options.OptionError as error:
        raise RecipeError(error.problem, key=f"{place}.{error.option}") from error


def _muon_table(recipe: Recipe) -> dict[str, Any]:
    # asdict would convert the splits to dicts.
    table = {item.name: getattr(recipe.muon, item.name) for item in fields(recipe.muon)}
    # Muon does not see the placement. With Muon's default, owners in each replica would exchange results.
    owner_per_replica = recipe.placement.muon == "owned" and recipe.placement.replicas == "each"
    if recipe.muon.expert.replicas == "auto" and owner_per_replica:
        table["expert"] = replace(recipe.muon.expert, replicas="redundant")
    return {**table, "machine": recipe.machine}
