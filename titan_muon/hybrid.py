"""One optimizer for a whole model: Muon for matrices, AdamW for the remaining parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .adam import AdamW
from .assignment.doubts import doubts, split_lines
from .assignment.groups import OPTIMIZER, ParamGroup, built, decided, trained_parameters
from .assignment.roles import Seen, see
from .assignment.rules import Assignment, Default, default_rules
from .assignment.table import frozen_lines, parameter_table
from .comm.agreement import Agreement
from .comm.clip import NormCheck, SkipsSteps
from .comm.equality import check_equal
from .muon import Muon
from .options import Offload, OptionError, Rule
from .state.saved import after_pre_hooks
from .tensors.names import canonical_fqn, named_parameters


@dataclass(frozen=True)
class Parts:
    """The optimizers of a model by name, with their groups. `whole`: with parameters of remote pipeline stages."""

    assignments: tuple[Assignment, ...]
    whole: tuple[Assignment, ...]
    groups: Mapping[str, Sequence[ParamGroup]]
    optimizers: Mapping[str, Optimizer]
    frozen: tuple[str, ...] = ()


def parts_of(
    modules: Sequence[nn.Module],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    tables: Mapping[str, Mapping[str, Any]],
    *,
    offload: Offload = "none",
    model: Mapping[str, Seen] | None = None,
) -> Parts:
    """Assign every trained parameter of `modules` to an optimizer, and make the optimizers.

    `model`: all parameters of the model, if this process holds a pipeline stage. The rest as in `decided`.
    """
    parameters = trained_parameters(modules)
    shared = {key: tables["muon"][key] for key in ("missing_grad", "nonfinite") if key in tables.get("muon", {})}
    tables = {**tables, "adamw": {**shared, **tables.get("adamw", {})}}
    seen = see(modules, canonical_fqn) if model is None else model
    is_stage = model is not None
    decision = decided(seen, parameters, rules, defaults, tables, offload=offload, is_stage=is_stage)
    optimizers = {
        name: built(name, groups, {"offload": offload, **decision.tables.get(name, {})}, parameters)
        for name, groups in decision.groups.items()
    }
    assignments = tuple(a for a in decision.whole if a.fqn in parameters)
    named = (pair for module in modules for pair in module.named_parameters())
    frozen = tuple(canonical_fqn(name) for name, parameter in named if not parameter.requires_grad)
    return Parts(assignments, decision.whole, decision.groups, optimizers, frozen)


class OfParts:
    """The methods of an optimizer made of `parts`."""

    parts: Parts

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

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """As `Muon.overlap`."""
        with ExitStack() as stack:
            for muon in self._muons:
                stack.enter_context(muon.overlap())
            yield

    def finish_step(self) -> None:
        """As `Muon.finish_step`."""
        for muon in self._muons:
            muon.finish_step()

    def check_last_step(self) -> None:
        """As `Muon.check_last_step`."""
        for muon in self._muons:
            muon.check_last_step()

    def skip_unless_finite(self, norm: NormCheck) -> None:
        """Let the next step change nothing if the norm is not finite.

        The step after the next then raises ValueError.
        """
        for optimizer in self.parts.optimizers.values():
            if isinstance(optimizer, SkipsSteps):
                optimizer.skip_unless_finite(norm)
            elif norm.broken:
                # Other optimizers cannot skip on the device, so the host waits.
                optimizer.zero_grad()

    def _carry(self) -> None:
        order = list(self.parts.optimizers.values())
        for muon in self._muons[:1]:
            others = {name: o for name, o in self.parts.optimizers.items() if isinstance(o, AdamW)}
            muon.carry(others)
            for adamw in others.values():
                adamw.care.carrier, adamw.care.follows = muon, order.index(adamw) > order.index(muon)

    def check_replicas(self, own: Iterable[str] = ()) -> None:
        """As `Muon.check_replicas`, for all optimizers."""
        for optimizer in self.parts.optimizers.values():
            if isinstance(optimizer, Muon | AdamW):
                optimizer.synchronize()
        separate = [parameter.fqn for muon in self._muons for parameter in muon.plan.parameters if parameter.separate]
        check_equal(self.parts.optimizers, Agreement(), (*own, *separate))

    def set_timeout(self, timeout: timedelta) -> None:
        """As `Muon.set_timeout`."""
        for muon in self._muons:
            muon.set_timeout(timeout)

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


class Hybrid(OfParts, SkipsSteps, Optimizer):
    """Muon for the hidden matrices of a model and AdamW for the rest, as a single torch.optim.Optimizer.

    Roles of modules, names and shapes decide: matrices and stacks of expert matrices go to Muon;
    embeddings, output heads, routers, norms, biases, convolutions and LoRA factors go to AdamW. `table()` prints all
    decisions.

    Args:
        model: the model, or its parts under pipeline parallelism.
        lr, weight_decay: for both optimizers.
        rules: the first matching rule decides, before roles, names and shapes.
        defaults: if false, rules must match every parameter.
        router: optimizer of the routers of mixtures of experts.
        muon, adamw: further keywords of `Muon` and of `titan_muon.adam.AdamW`.
        others: options of further registered optimizers named by rules.

    Attributes:
        optimizers: by name, `"muon"` and `"adamw"`. Groups and state are shared with this optimizer.
        assignments: the optimizer of each parameter, with the reason.

    A group of `param_groups` has the keys of its optimizer, `param_names`, and the optimizer's name under
    `"optimizer"`. `state` has `momentum_buffer` for Muon's parameters, and `step`, `exp_avg` and `exp_avg_sq` for
    AdamW's. State dicts have torch's format.

    Raises:
        OptionError: for a rule without parameters, an undecided parameter, no parameter for Muon, and refused options.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        rules: Sequence[Rule] = (),
        defaults: bool = True,
        router: str = "adamw",
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        others: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        modules = [model] if isinstance(model, nn.Module) else list(model)
        shared = {"lr": lr, "weight_decay": weight_decay}
        tables = {"muon": {**shared, **(muon or {})}, "adamw": {**shared, **(adamw or {})}, **(others or {})}
        self.parts = parts_of(modules, rules, default_rules(router) if defaults else None, tables)
        # Optimizer keeps references to these dicts.
        groups = []
        for name, optimizer in self.parts.optimizers.items():
            for group in optimizer.param_groups:
                group[OPTIMIZER] = name
                groups.append(group)
        super().__init__(groups, {})
        self._link()
        splits = tables["muon"].get("split", ())
        for line in (*split_lines(self.assignments, splits), *doubts(self.assignments, splits)):
            warnings.warn(line.removeprefix("warning: "), stacklevel=2)

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        return self.parts.optimizers

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Without the flag torch.amp.GradScaler skips the whole step.
        return all(getattr(part, "_step_supports_amp_scaling", False) for part in self.optimizers.values())

    def table(self, *, full: bool = False) -> str:
        """The parameter table. Equal parameters of all layers share a line, unless `full`."""
        table = parameter_table(self.assignments, dict(named_parameters(self.param_groups)), None, full=full)
        return "\n".join([table, *frozen_lines(self.parts.frozen)])

    def build(self) -> Self:
        """As `Muon.build`."""
        for muon in self._muons:
            muon.build()
        return self

    def rebuild(self) -> None:
        """As `Muon.rebuild`."""
        for muon in self._muons:
            muon.rebuild()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters once. Every rank calls `step`. Returns the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.optimizers.values():
            for name in ("grad_scale", "found_inf"):
                # torch.amp.GradScaler sets both for a step.
                if hasattr(self, name):
                    setattr(part, name, getattr(self, name))
            try:
                part.step()
            finally:
                for name in ("grad_scale", "found_inf"):
                    if hasattr(part, name):
                        delattr(part, name)
        if len(self.state) != sum(len(part.state) for part in self.optimizers.values()):
            self._link()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's format. Ranks and errors as in `Muon.state_dict`."""
        for part in self.optimizers.values():
            # Finishes the part's transfers and checks its last step.
            part.state_dict()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and state. Ranks and errors as in `Muon.load_state_dict`.

        Raises ValueError also for different optimizers in the groups.
        """
        with after_pre_hooks(self, state_dict) as loaded:
            if missing := {"state", "param_groups"} - loaded.keys():
                absent = " and no ".join(sorted(missing, reverse=True))
                raise ValueError(f"state_dict: has no {absent}; pass what state_dict() returned")
            saved = loaded["param_groups"]
            mine = [(group[OPTIMIZER], group["param_names"]) for group in self.param_groups]
            theirs = [(group.get(OPTIMIZER), group.get("param_names")) for group in saved]
            if mine != theirs:
                raise ValueError(_difference(mine, theirs))
            for name, part in self.optimizers.items():
                groups = [group for group in saved if group[OPTIMIZER] == name]
                keys = {key for group in groups for key in group["params"]}
                state = {key: value for key, value in loaded["state"].items() if key in keys}
                part.load_state_dict({"state": state, "param_groups": groups})
            self._link()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def close(self) -> None:
        """As `Muon.close`."""
        for muon in self._muons:
            muon.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because the parameters come from the model."""
        if not any(param_group is group for part in self.optimizers.values() for group in part.param_groups):
            raise ValueError("Hybrid takes the parameters of its model: build a new Hybrid for more of them")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "parts" in state:
            self._carry()

    def _link(self) -> None:
        self._carry()
        self.param_groups[:] = [group for part in self.optimizers.values() for group in part.param_groups]
        self.state.clear()
        for part in self.optimizers.values():
            self.state.update(part.state)


def _difference(mine: Sequence[tuple[Any, Any]], theirs: Sequence[tuple[Any, Any]]) -> str:
    if any(name is None for name, _ in theirs):
        return "the state dict is of another optimizer: its groups have no 'optimizer'; load one that Hybrid saved"
    of_mine = {fqn: name for name, names in mine for fqn in names}
    of_theirs = {fqn: name for name, names in theirs for fqn in names or ()}
    for fqn, name in of_mine.items():
        if of_theirs.get(fqn) != name:
            other = of_theirs.get(fqn, "no optimizer")
            return f"{fqn}: the state dict has it with {other}, and this Hybrid with {name}; give both the same rules"
    return "the state dict has other parameters or groups than this Hybrid; give both the same model and rules"
