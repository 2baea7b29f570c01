"""One optimizer for a whole model: Muon for matrices, AdamW for the remaining parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .adamw import AdamW
from .assignment.given_groups import optimizers_of_groups
from .assignment.groups import OPTIMIZER, modules_of
from .assignment.optimizer_set import ForwardsToParts, PartStates, build_optimizers
from .assignment.options import Rule, refuse_hybrid_keywords, with_expert
from .assignment.roles import IsMuon
from .assignment.saved import load_parts
from .assignment.table import decay_lines, doubts, frozen_lines, parameter_table, split_lines
from .engine.exchange.agreement import Agreement
from .engine.faults.skip import SkipsSteps
from .engine.state.saved import after_pre_hooks
from .engine.tensors.names import named_parameters, warn
from .engine.tensors.process_groups import checked_group, group_name, group_named, ranks_of
from .engine.tensors.storage import placement_key
from .muon import Muon
from .options import NO_EXPERT, Expert, MuonOptions


class Hybrid(ForwardsToParts, SkipsSteps, Optimizer):
    """Muon for the hidden matrices of a model and AdamW for the rest, as a single torch.optim.Optimizer.

    Roles of modules, names and shapes decide: matrices and stacks of expert matrices go to Muon;
    embeddings, output heads, routers, norms, biases, convolutions and LoRA factors go to AdamW. `table()` prints all
    decisions. Frozen parameters have an optimizer too, and train after they are thawed and `rebuild` is called.

    Args:
        model: the model, or its parts under pipeline parallelism.
        lr, weight_decay: for both optimizers.
        rules: the first matching rule decides, before roles, names and shapes.
        defaults: if false, rules or `is_muon` must decide for every parameter.
        is_muon: takes a name and a parameter, and returns true for Muon, false for AdamW, or None to leave the
            parameter to the defaults. Rules come before.
        router: optimizer of the routers of mixtures of experts.
        decay_vectors: decay norms, biases and other one-dimensional parameters too.
        expert: as in `Muon`. `on_bad_gradient` is for both optimizers.
        muon, adamw: other keywords of `Muon` and of `titan_muon.adamw.AdamW`.
        others: options of other registered optimizers named by rules.
        process_group: the ranks with this model, as in `Muon`.

    Attributes:
        optimizers: by name, `"muon"` and `"adamw"`. `state` and `param_groups` are views of theirs.
        assignments: the optimizer of each trained parameter, with the reason.

    A group of `param_groups` has the keys of its optimizer, `param_names`, and the optimizer's name under
    `"optimizer"`. Methods with the name of a method of `Muon`, such as `build` and `close`, do the same for
    the model's Muon. `state` has `momentum_buffer` for Muon's parameters, and `step`, `exp_avg` and `exp_avg_sq` for
    AdamW's. State dicts have torch's format.

    Raises:
        OptionError: for a rule without parameters, an undecided parameter, no parameter for Muon, and refused options.
        ValueError: for parameters in place of a model.
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
        decay_vectors: bool = False,
        expert: Expert = NO_EXPERT,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        others: Mapping[str, Mapping[str, Any]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        is_muon: IsMuon | None = None,
        **unknown: Never,
    ) -> None:
        refuse_hybrid_keywords(unknown)
        self.process_group = checked_group(process_group)
        shared = {"lr": lr, "weight_decay": weight_decay}
        of_muon = {**shared, **with_expert(muon or {}, expert)}
        tables = {"muon": of_muon, "adamw": {**shared, **(adamw or {})}, **(others or {})}
        self.parts = build_optimizers(
            modules_of(model),
            rules,
            router if defaults else None,
            tables,
            decay_vectors=decay_vectors,
            is_part=len(ranks_of(process_group)) > 1,
            knows_frozen=True,
            is_muon=is_muon,
        )
        self._begin({**shared, "momentum": of_muon.get("momentum", MuonOptions.momentum)})
        splits = of_muon.get("split", ())
        for line in (*split_lines(self.assignments, splits), *doubts(self.assignments, splits)):
            warn(line.removeprefix("warning: "))

    @classmethod
    def from_groups(
        cls,
        model: nn.Module | Iterable[nn.Module],
        groups: Iterable[Mapping[str, Any]],
        *,
        expert: Expert = NO_EXPERT,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> Self:
        """A Hybrid with the parameter groups of another Muon: Keller Jordan's (`use_muon`), or dion's (`algorithm`).

        The model names the parameters. `expert`, `muon`, `adamw`: keywords of whole optimizers. `defaults`:
        hyperparameters that groups lack, as the other constructor took: `lr`, `mu`, `betas`. Raises as
        `optimizers_of_groups`.
        """
        hybrid, tables = cls.__new__(cls), {"muon": with_expert(muon or {}, expert), "adamw": adamw or {}}
        hybrid.process_group = checked_group(process_group)
        hybrid.parts = optimizers_of_groups(modules_of(model), groups, defaults, tables)
        hybrid._begin({"lr": hybrid.param_groups[0]["lr"]})
        return hybrid

    def _begin(self, defaults: dict[str, Any]) -> None:
        """Make one optimizer of the parts."""
        # Schedulers read `defaults`: Transformers' the rate, and OneCycleLR whether a momentum can cycle (`step`).
        super().__init__(self.param_groups, defaults)
        for part in self._muons:
            part.process_group = self.process_group
        self._share_report()
        self._remember_parameters()

    # The two attributes of torch.optim.Optimizer are views of the parts, so that no copy can become stale.

    @property  # type: ignore[override]
    def state(self) -> PartStates:
        """State by parameter: a view of the states of all parts."""
        return PartStates(self.optimizers.values())

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        for part in self.optimizers.values():
            part.state = defaultdict(dict, {p: state[p] for p in _parameters(part) if p in state})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, each with the name of its optimizer."""
        for name, part in self.optimizers.items():
            for group in part.param_groups:
                # A part may have loaded a state dict that was saved outside of a Hybrid.
                group[OPTIMIZER] = name
        return [group for part in self.optimizers.values() for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not all(any(group is known for known in self.param_groups) for group in groups):
            raise ValueError("param_groups: Hybrid's groups are those of its optimizers; change the dicts in place")

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        return self.parts.optimizers

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Without the flag torch.amp.GradScaler skips the whole step.
        return all(getattr(part, "_step_supports_amp_scaling", False) for part in self.optimizers.values())

    def table(self, *, full: bool = False) -> str:
        """The parameter table. Equal parameters of all layers share a line, unless `full`."""
        splits = [split for muon in self._muons for split in muon.options.split]
        named = dict(named_parameters(self.param_groups))
        table = parameter_table(self.assignments, named, None, full=full, splits=splits)
        return "\n".join([table, *decay_lines(self.parts.groups), *frozen_lines(self.parts.frozen)])

    def build(self) -> Self:
        for muon in self._muons:
            muon.build()
        return self

    def rebuild(self) -> None:
        """Expect gradients of the parameters that are not frozen now, and plan as `Muon.rebuild`."""
        Agreement(self.process_group).raise_on_all_ranks(self._follow)
        for part in self.optimizers.values():
            if isinstance(part, Muon | AdamW):
                part.rebuild()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters once. Every rank calls `step`. Returns the result of `closure`.

        Raises ValueError as `Muon.step`, and for a scheduler that cycles the momentum.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        _check_momentum(self.param_groups)
        self._follow()
        # torch.amp.GradScaler sets both for a step.
        scaler = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        for part in self.optimizers.values():
            vars(part).update(scaler)
        try:
            self._prepare_parts()
            for part in self.optimizers.values():
                part.step()
        finally:
            for part in self.optimizers.values():
                for name in scaler:
                    delattr(part, name)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's format. Ranks and errors as in `Muon.state_dict`."""
        self._follow()
        for part in self.optimizers.values():
            # Finishes the part's transfers and checks its last step.
            part.state_dict()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and state by name. Collective as `Muon.load_state_dict`.

        A state dict of torch.optim.AdamW continues AdamW's parameters, with a warning about the momentum of the rest:
        its groups need `param_names`, or must be a single group of all parameters in the model's order.

        Raises ValueError on every rank, before anything is loaded, as `Muon.load_state_dict`, and for parameters that
        the state dict has with another optimizer.
        """
        with after_pre_hooks(self, state_dict) as loaded:
            agreement = Agreement(self.process_group)
            agreement.raise_on_all_ranks(self._follow)
            orders = self.parts.order, [assignment.fqn for assignment in self.assignments]
            load_parts(loaded, self.optimizers, self.param_groups, orders, agreement)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def close(self) -> None:
        for muon in self._muons:
            muon.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because the parameters come from the model."""
        if not any(param_group is group for group in self.param_groups):
            raise ValueError("Hybrid takes the parameters of its model: build a new Hybrid for more of them")

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "parts": self.parts, "process_group": group_name(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "process_group": group_named(state.get("process_group"))})
        self._share_report()
        self._remember_parameters()

    def _remember_parameters(self) -> None:
        self._known = {name: weakref.ref(p) for name, p in named_parameters(self.param_groups)}

    def _follow(self) -> None:
        """Give the states of replaced parameters to their successors in the groups. Muon does so in `rebuild`.

        Raises ValueError for a successor with another mesh, placement or shape.
        """
        for part in self.optimizers.values():
            for fqn, parameter in named_parameters(part.param_groups) if not isinstance(part, Muon) else ():
                previous = self._known[fqn]()
                if previous is parameter:
                    continue
                if previous is not None and previous in part.state:
                    if placement_key(previous) != placement_key(parameter):
                        raise ValueError(
                            f"{fqn}: resharded since its first step, and its state does not fit; build a new "
                            "optimizer, and load the state from a checkpoint of torch.distributed.checkpoint"
                        )
                    part.state[parameter] = part.state.pop(previous)
                self._known[fqn] = weakref.ref(parameter)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_momentum(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for AdamW groups with keys of a scheduler that cycles the momentum."""
    if any("max_momentum" in group and "betas" in group for group in groups):
        raise ValueError(
            "a scheduler cycles the momentum, and PyTorch cannot cycle Muon's momentum and AdamW's betas together; "
            "make optimizer and scheduler anew, with cycle_momentum=False in OneCycleLR or CyclicLR"
        )
