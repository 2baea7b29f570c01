"""The optimizers of a model: decisions, groups and objects."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import registry
from ..adamw import AdamW
from ..engine.exchange.agreement import Agreement
from ..engine.faults.skip import CheckedNorm, SkipsSteps, agreed_scaling
from ..matrices.stacks import check_splits, has_matrices, split_hint
from ..muon import Muon
from ..options import EXPERT, SHARED, Expert, Offload, OptionError, Split
from .groups import ParamGroup, assigned_model, frozen_in, groups_of_parameters, named_parameters_of
from .options import Rule
from .roles import IsMuon, ParameterInfo, inspect_model
from .rules import Assignment, splits_with


@dataclass(frozen=True)
class OptimizerSet:
    """The optimizers of a model by name, with their groups.

    `assignments` has the trained parameters, and `whole` also those of remote pipeline stages. `order`: the names in
    all groups, in the model's order. `frozen`: names of parameters without gradients.
    """

    assignments: tuple[Assignment, ...]
    whole: tuple[Assignment, ...]
    groups: Mapping[str, Sequence[ParamGroup]]
    optimizers: Mapping[str, Optimizer]
    order: tuple[str, ...]
    frozen: tuple[str, ...]

    @property
    def muon(self) -> Muon | None:
        return next((part for part in self.optimizers.values() if isinstance(part, Muon)), None)


class PartStates(Mapping[Tensor, Any]):
    """A view of the states of several optimizers by parameter. Writes go to the optimizer of the parameter."""

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self._parts = tuple(parts)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._state_for(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, values: Any) -> None:
        self._state_for(parameter)[parameter] = values

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def _state_for(self, parameter: Tensor) -> dict[Tensor, Any]:
        for part in self._parts:
            if parameter in part.state or any(parameter is p for group in part.param_groups for p in group["params"]):
                return part.state
        raise KeyError(parameter)


class ForwardsToParts:
    """The methods of an optimizer made of `parts`.

    A method with the name of a method of `Muon` does the same for the Muon among the parts, and `check_replicas` for
    all optimizers.
    """

    parts: OptimizerSet
    process_group: dist.ProcessGroup | None = None

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        return self.parts.assignments

    @property
    def _muons(self) -> list[Muon]:
        return [optimizer for optimizer in self.parts.optimizers.values() if isinstance(optimizer, Muon)]

    def parameters(self, name: str) -> list[Tensor]:
        optimizer = self.parts.optimizers.get(name)
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def learning_rates(self) -> dict[str, float]:
        return {
            group.tag: float(current["lr"])
            for name, optimizer in self.parts.optimizers.items()
            for group, current in zip(self.parts.groups[name], optimizer.param_groups, strict=True)
        }

    def finish_step(self) -> None:
        for muon in self._muons:
            muon.finish_step()

    def check_last_step(self) -> None:
        for muon in self._muons:
            muon.check_last_step()

    def skip_unless_finite(self, norm: CheckedNorm) -> None:
        """Let the next step change nothing if the norm is not finite. The step after it then raises ValueError."""
        for optimizer in self._skipping:
            optimizer.skip_unless_finite(norm)

    @property
    def _skipping(self) -> list[SkipsSteps]:
        return [optimizer for optimizer in self.parts.optimizers.values() if isinstance(optimizer, SkipsSteps)]

    def _prepare_parts(self) -> None:
        """Prepare a step of all parts, and give them one flag, so that all skip together."""
        device = next((muon.engine.rank.device for muon in self._muons), torch.device("cpu"))
        scaling = agreed_scaling(self, self._skipping, device)
        for optimizer in self.parts.optimizers.values():
            if isinstance(optimizer, SkipsSteps):
                optimizer.give_scaling(scaling)
            elif scaling is not None and scaling.skipped:
                # Other optimizers cannot skip on the device, so the host waits.
                optimizer.zero_grad()

    def _share_report(self) -> None:
        order = list(self.parts.optimizers.values())
        # Rules may give all parameters to other optimizers.
        optional = not any(a.by_default for a in self.parts.assignments)
        for muon in self._muons[:1]:
            others = {name: o for name, o in self.parts.optimizers.items() if isinstance(o, AdamW)}
            muon.report_for(others, optional=optional)
            for adamw in others.values():
                adamw.gradient_faults.report_with(muon, follows=order.index(adamw) > order.index(muon))

    def free(self) -> None:
        """After a step: free Muon's buffers and captured steps until the next, as before process groups end."""
        for muon in self._muons:
            muon.engine.free()

    def check_replicas(self, own: Iterable[str] = ()) -> None:
        from ..features.replica_check import check_equal

        for optimizer in self.parts.optimizers.values():
            if isinstance(optimizer, Muon | AdamW):
                optimizer.synchronize()
        separate = [parameter.fqn for muon in self._muons for parameter in muon.plan.parameters if parameter.separate]
        check_equal(self.parts.optimizers, Agreement(self.process_group), (*own, *separate))

    def offload(self) -> None:
        """Keep the states of all optimizers on the host from now on. Raises OptionError if any cannot."""
        self._move("offload")

    def reload(self) -> None:
        """Keep the states of all optimizers on the device from now on. Raises OptionError if any cannot."""
        self._move("reload")

    def _move(self, method: str) -> None:
        optimizers = self.parts.optimizers
        if fixed := [name for name, optimizer in optimizers.items() if not hasattr(optimizer, method)]:
            raise OptionError(f"{method}:", f"{', '.join(fixed)} cannot move its states")
        for optimizer in optimizers.values():
            getattr(optimizer, method)()


def build_optimizers(
    modules: Sequence[nn.Module],
    rules: Sequence[Rule],
    router: str | None,
    tables: Mapping[str, Mapping[str, Any]],
    *,
    offload: Offload = "none",
    decay_vectors: bool = False,
    model: Mapping[str, ParameterInfo] | None = None,
    is_part: bool = False,
    knows_frozen: bool = False,
    is_muon: IsMuon | None = None,
) -> OptimizerSet:
    """Assign every trained parameter of `modules` to an optimizer, and make the optimizers.

    Args:
        tables: options by optimizer.
        model: all trained parameters of the model, if this process holds a pipeline stage.
        knows_frozen: whether groups have frozen parameters too, to be thawed later.
        router, is_part, is_muon: as in `assign_parameters`, `assigned_model` and `inspect_model`.

    Raises:
        OptionError: for a rule without parameters, an undecided parameter, an unknown optimizer, and a refused option.
        ValueError: for a split without a Muon parameter.
    """
    frozen = frozen_in(modules)
    parameters = {n: p for n, p in named_parameters_of(modules).items() if knows_frozen or n not in frozen}
    expert = tables.get("muon", {}).get("expert", Expert())
    tables = {**tables, **_shared_options(rules, tables)}
    tables["adamw"] = {"on_bad_gradient": expert.on_bad_gradient, **tables.get("adamw", {})}
    known = inspect_model(modules, frozen=knows_frozen, is_muon=is_muon) if model is None else model
    # From the whole model, because all ranks build Muon together: ranks would wait for a pipeline rank without Muon.
    assigned = assigned_model(known, rules, router, frozen, is_part=is_part)
    splits = tables.get("muon", {}).get("split", ())
    _check_matrices(assigned, rules, splits)
    groups: dict[str, tuple[ParamGroup, ...]] = {}
    for name, whole_groups in groups_of_parameters(rules, tables, assigned, decay_vectors=decay_vectors).items():
        _check_offload(offload, name)
        groups[name] = tuple(replace(g, names=tuple(n for n in g.names if n in parameters)) for g in whole_groups)
    if is_part:
        # Every rank builds Muon, also a rank without matrices.
        groups.setdefault("muon", (ParamGroup(None, "muon", (), {}),))
    muon = [a for a in assigned if a.optimizer == "muon"]
    if muon:
        check_splits([a.fqn for a in muon], splits)
    # Muon refuses an unmatched split and does not know the remaining pipeline stages.
    local = [a for a in muon if a.fqn in parameters]
    splits = tuple(s for s in splits_with(splits, local) if any(fnmatchcase(a.fqn, s.match) for a in local))
    tables = {**tables, "muon": {**tables.get("muon", {}), "split": splits}}
    optimizers = {
        name: build_optimizer(name, groups[name], {"offload": offload, **tables.get(name, {})}, parameters)
        for name in groups
    }
    whole = tuple(a for a in assigned if a.fqn not in frozen)
    assignments = tuple(a for a in whole if a.fqn in parameters)
    return OptimizerSet(assignments, whole, groups, optimizers, tuple(parameters), tuple(sorted(frozen)))


def _shared_options(rules: Sequence[Rule], tables: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Options of a whole optimizer, from the rules of each optimizer without a table.

    Raises OptionError for an unknown optimizer, rules that disagree, and an option that belongs into a table.
    """
    agreed: dict[str, dict[str, Any]] = {}
    for index, rule in enumerate(rules):
        try:
            entry = registry.optimizers.get(rule.optimizer)
        except ValueError as error:
            raise OptionError(f"rules[{index}].optimizer", str(error).removeprefix("optimizer ")) from error
        of_expert = [key for key in EXPERT if key in SHARED and rule.optimizer == "muon"]
        shared = {*entry.shared, *of_expert} - {*entry.by_rule}
        for key in [key for key in rule.options if key in shared]:
            name, value = f"rules[{index}].options.{key}:", rule.options[key]
            problem = f"{key} holds for all of {rule.optimizer}"
            if rule.optimizer in tables:
                raise OptionError(name, f"{problem}; set {rule.optimizer}{'.expert' * (key in of_expert)}.{key}")
            earlier = agreed.setdefault(rule.optimizer, {}).setdefault(key, value)
            if earlier != value:
                raise OptionError(name, f"{problem}, and an earlier rule says {earlier!r}; make them equal")
    return agreed


def _check_offload(offload: Offload, optimizer: str) -> None:
    """Raise OptionError if `offload` asks for host states from an optimizer with device states."""
    entries = registry.optimizers
    if offload == "state" and "offload" not in entries.get(optimizer).shared:
        offloading = ", ".join(name for name in entries.names() if "offload" in entries.get(name).shared)
        raise OptionError(
            "offload",
            f'= "{offload}": {optimizer} keeps its states on the device; set "none", or give its parameters to one of '
            f"{offloading}",
        )


def _check_matrices(assigned: Iterable[Assignment], rules: Sequence[Rule], splits: Sequence[Split]) -> None:
    """Raise OptionError for a rule, or `is_muon`, that gives Muon a parameter without matrices."""
    for a in assigned:
        if a.optimizer == "muon" and not a.by_default and not has_matrices(a.fqn, a.shape, splits):
            by_rule = "" if a.rule is None else f"(match = {rules[a.rule].match!r}) "
            raise OptionError(
                "is_muon" if a.rule is None else f"rules[{a.rule}]",
                f"{by_rule}gives Muon {a.fqn} of shape {a.shape}, and Muon takes matrices (2D) and stacks of matrices "
                f"(3D); leave it out, or {split_hint(len(a.shape))}",
            )


def build_optimizer(
    name: str, groups: Sequence[ParamGroup], table: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> Optimizer:
    """The optimizer `name` with these groups; `table`: its options.

    Raises OptionError for an invalid or unknown option; for an option of a rule, `option` is `rules[i].options.KEY`.
    """
    dicts = [group.of_torch(parameters) for group in groups]
    of_rule = {key: group for group in groups if group.rule is not None for key in group.options}

    def named(key: str, problem: str = "") -> str:
        # A recipe's table has every option, so that the refused value tells which of both it is.
        group = of_rule.get(key)
        refused = () if group is None else (f"= {group.options[key]!r} ", f"= {group.options[key]!r}:")
        if group is not None and (key not in table or problem.startswith(refused)):
            return f"rules[{group.rule}].options.{key}"
        return key if name == "muon" else f"{name}.{key}"

    try:
        with warnings.catch_warnings():
            # The caller warns about the whole model, with the roles of parameters.
            warnings.simplefilter("ignore")
            optimizer: Optimizer = registry.optimizers.get(name).build(dicts, **registry.shared_options(name, table))
    except OptionError as error:
        raise OptionError(named(error.option, error.problem), error.problem) from error
    for group in groups:
        # torch silently keeps unknown keys of a group.
        for key in group.options:
            if key not in optimizer.defaults and key not in registry.optimizers.get(name).by_rule:
                known = ", ".join(optimizer.defaults)
                raise OptionError(f"{named(key)}:", f"{name} has no such option; it takes {known}")
    return optimizer
