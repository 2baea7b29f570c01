"""Muon for parameters in any layout: a torch.optim.Optimizer that runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Never, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from . import selection
from .engine.engine import Engine, Selection, checked_plan, engine_of
from .engine.exchange.agreement import Agreement, report_of
from .engine.exchange.exchange import Collectives, Exchange
from .engine.faults.replicas import separate_layouts
from .engine.faults.report import Reported
from .engine.faults.skip import SkipsSteps
from .engine.layout.intervals import Geometries
from .engine.layout.types import Layout, Plan
from .engine.state.saved import after_pre_hooks, check_frozen, check_saved_groups, completed, copy_state, saved_states
from .engine.state.states import (
    move_to_replacements,
    moved,
    needs_move,
    resolved,
    unchanged_after_errors,
    with_matrix_states,
    with_states,
)
from .engine.step.gradients import StepGradients, check_first_gradients
from .engine.tensors.dtensor import mesh_groups
from .engine.tensors.names import named_parameters, warn
from .engine.tensors.process_groups import checked_group, group_name, group_named, ranks_of
from .engine.tensors.storage import (
    STEP,
    TrainedParam,
    check_lr,
    coefficient_rows,
    device_of,
    trained_params,
)
from .options import HYPERPARAMETERS, NO_EXPERT, Expert, Machine, MuonOptions, Offload, Split, muon_options


class Muon(SkipsSteps, Optimizer):
    """Momentum, orthogonalized by Newton-Schulz (Keller Jordan, 2024), for matrices in any layout.

    Equal to torch.optim.Muon with the same `adjust_lr_fn` on the full matrices: bit for bit on the CPU with
    `Expert(orthogonalize="reference")` and float32 weights, and up to rounding otherwise. torch's default of
    `adjust_lr_fn` is "original". The momentum is torch's exponential moving average.

    Construction checks the arguments. The first `step` calls `build`, which plans and allocates. Until then,
    parameters may be sharded, moved, or replaced in `param_groups`, as Accelerate does.

    Args:
        params: (name, parameter) pairs as from `model.named_parameters()`, or groups with `params` and `param_names`
            (or with pairs as `params`), and optionally `eps` and fields of `options.Hyperparameters`. Parameters are
            (m, n) matrices or (count, m, n) stacks: plain tensors, or DTensors with any placement except Partial.
            Under DDP, each rank orthogonalizes a share of the plain tensors. A rank without trained matrices passes an
            empty list.
        process_group: the ranks that train these parameters together, by default all.
        expert: options that few runs set. The remaining keywords are fields of `options.MuonOptions`.

    Raises:
        ValueError: for parameters without names, without matrices, or without a real floating dtype; for unknown names
            and numbers out of range.
    """

    # torch.amp.GradScaler then runs every step.
    _step_supports_amp_scaling = True
    _built_late = False
    _optional = False
    _gradients: StepGradients | None = None
    _others: Mapping[str, Reported] = MappingProxyType({})
    transport: type[Collectives] = Collectives
    """Collectives of the exchange."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[Any] = "keller_jordan",
        adjust_lr_fn: float | str | None = "match_rms_adamw",
        algorithm: str | Sequence[str] = "muon",
        beta2: float = 0.95,
        momentum_warmup_steps: int = 0,
        momentum_start: float = 0.85,
        cautious: bool = False,
        overlap: str = "none",
        state: str = "replicated",
        state_dtype: str = "float32",
        split: Sequence[Split] = (),
        offload: Offload = "none",
        machine: Machine = MuonOptions.machine,
        process_group: dist.ProcessGroup | None = None,
        expert: Expert = NO_EXPERT,
        **unknown: Never,
    ) -> None:
        self.process_group = checked_group(process_group)
        check_lr(lr)
        self._options = muon_options(
            unknown,
            expert,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            ns_coefficients=coefficient_rows(ns_coefficients),
            adjust_lr_fn=adjust_lr_fn,
            algorithm=selection.choice_of(algorithm),
            beta2=beta2,
            momentum_warmup_steps=momentum_warmup_steps,
            momentum_start=momentum_start,
            cautious=cautious,
            overlap=overlap,
            state=state,
            state_dtype=state_dtype,
            split=selection.splits_of(split),
            offload=offload,
            machine=machine,
        )
        self._algorithm, self._closed = selection.algorithm_of(self._options), False
        self._agreement: Agreement | None = None
        self._engine: Engine | None = None
        groups = selection.given_groups(params, alone=len(ranks_of(process_group)) == 1)
        super().__init__(groups, {name: getattr(self._options, name) for name in HYPERPARAMETERS})

    def build(self) -> Self:
        """Plan the step, compare the plan between ranks, and allocate momentum and buffers. Returns this optimizer.

        Collective over `process_group`. `step`, `plan`, and `load_state_dict` call `build` if necessary.

        Raises:
            ValueError: on every rank, for a parameter on the meta device, passed twice, or placed as Partial; for
                splits without a match; without trained parameters; for plans that differ between ranks; after `close`.
        """
        if self._engine is None:
            self._build()
        return self

    def rebuild(self) -> None:
        """Plan again, for parameters that were frozen, thawed, moved, converted, or replaced since `build`.

        Collective. Momentum is kept by name. After a change of mesh or placements, load momentum from a checkpoint.
        Raises ValueError on every rank like `build`, and for momentum that does not fit. Then nothing changes.
        """
        if self._engine is None:
            return self._build()
        self.synchronize()
        planned = self.param_groups, self.state, self._engine.rank.params, self._options.offload
        with unchanged_after_errors(self.param_groups, self.state):
            self._agreed.raise_on_all_ranks(lambda: move_to_replacements(*planned))
            self._build()

    @property
    def options(self) -> MuonOptions:
        """The options of all parameters."""
        return self._options

    @property
    def plan(self) -> Plan:
        """The owner of each matrix, and the exchange of its pieces."""
        return self.engine.rank.plan

    @property
    def exchange(self) -> Exchange:
        """The collectives, with a count of the sent bytes."""
        return self.engine.rank.exchange

    @property
    def orthogonalized(self) -> int:
        """Number of matrices that a step orthogonalizes on this rank."""
        return self.engine.orthogonalized

    @property
    def engine(self) -> Engine:
        self._built_late = self._built_late or self._engine is None
        self.build()
        assert self._engine is not None, "build() makes the engine or raises"
        return self._engine

    @property
    def _agreed(self) -> Agreement:
        assert self._agreement is not None, "build() makes the agreement first"
        return self._agreement

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters once. Every holder of a parameter calls `step`. Returns the result of `closure`.

        Raises:
            ValueError: on every rank, for a trained parameter without a gradient, or with a non-finite gradient in the
                previous step; for parameters, momentum, or iterations that changed since `build` (see `rebuild`).
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        scaling = self.take_scaling(self.engine.rank.device)
        assert self._gradients is not None, "a step is prepared"
        gradients, self._gradients = self._gradients, None
        self.engine.run(gradients, scaling)
        for group in self.param_groups:
            if STEP in group:
                group[STEP] += 1
        return loss

    def prepare_step(self) -> Tensor | None:
        engine = self.engine
        if self._built_late and not self._options.skips_missing:
            self._agreed.raise_on_all_ranks(lambda: check_first_gradients(engine.rank.params))
        self._built_late = False
        if self._last_norm is not None:
            self.check_norm(skips=self._options.skips_step)
        self._gradients = engine.gradients(self.param_groups, self.state)
        if not self._options.skips_step:
            return None
        return engine.bad_gradients(self._gradients, scaled=getattr(self, "found_inf", None) is not None)

    def finish_step(self) -> None:
        """Apply the updates that the last step left to the next forward (`overlap = "forward"`).

        Call this before code that reads or writes weights between a step and the next forward, except state dicts.
        """
        if self._engine is not None:
            self._engine.finish()

    def check_last_step(self) -> None:
        """Raise ValueError for missing or non-finite gradients in the last step, like the next step would.

        Collective; call this before saving weights and at the end of training. Waits for the device. Includes
        `finish_step`.
        """
        self._check_last_step(alone=False)

    def _check_last_step(self, *, alone: bool) -> None:
        self.finish_step()
        if not alone:
            self.check_norm(skips=self._options.skips_step)
        if self._engine is not None:
            self._engine.raise_pending(alone=alone)
            if not alone:
                # Faults from optimizers that step after Muon.
                self._engine.rank.report.send()
                self._engine.raise_pending()

    def report_for(self, others: Mapping[str, Reported], *, optional: bool = False) -> None:
        """Report also the faults and hyperparameters of other optimizers, by name; before `build`.

        `optional`: whether the other optimizers may have all parameters of all ranks.
        """
        assert self._engine is None or dict(others) == dict(self._others), "Muon was built without these optimizers"
        self._others, self._optional = dict(others), optional

    def check_replicas(self, own: Iterable[str] = ()) -> None:
        """Raise ValueError on every rank if replicas of weights or states, or hyperparameters, differ between ranks.

        Collective over `process_group`, between steps; the host waits. `own`: globs on names of plain tensors that each
        rank trains separately.
        """
        from .features.replica_check import check_equal

        self.synchronize()
        separate = [parameter.fqn for parameter in self.plan.parameters if parameter.separate]
        check_equal({"muon": self}, self._agreed, (*own, *separate))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum of Muon or torch.optim.Muon (other optimizers: `titan_muon.converted`).

        Collective over `process_group`. Raises ValueError on every rank, before anything is loaded, for different
        parameters or a different optimizer, and for momentum missing or with a different mesh or placement.
        """
        with after_pre_hooks(self, state_dict) as loaded:
            self._load(loaded)

    def _load(self, state_dict: dict[str, Any]) -> None:
        agreement = Agreement(self.process_group)
        state_dict = agreement.raise_on_all_ranks(lambda: completed(state_dict, self.param_groups))
        # A rank without matrices has no state, and builds with the others.
        if self._engine is None and not agreement.any_rank(bool(state_dict["state"])):
            # Saved before the first step: only hyperparameters.
            agreement.raise_on_all_ranks(lambda: check_saved_groups(self.param_groups, state_dict["param_groups"]))
            return super().load_state_dict(state_dict)
        self.build()
        self._replanned()
        # A state dict shares its dicts with the optimizer.
        current = {p.param: {**self.state[p.param], "momentum_buffer": p.momentum} for p in self.engine.rank.params}
        saved = self._agreed.raise_on_all_ranks(lambda: list(saved_states(self.param_groups, state_dict, current)))
        check_frozen(self.param_groups, state_dict, self._agreed.gathered)
        self.synchronize()
        # Optimizer.load_state_dict rounds state to the parameter's dtype, and moves all state to the device at once.
        keys = {key for key, _, _ in saved}
        others = {key: state for key, state in state_dict["state"].items() if key not in keys}
        super().load_state_dict({**state_dict, "state": others})
        for _, param, tensors in saved:
            for name, tensor in tensors.items():
                # In place, because memory may not suffice for two copies.
                copy_state(tensor, current[param][name], param)
        self.state.update(current)
        if not self._replanned():
            params = self._trained_params()
            states = with_matrix_states(self.plan, params, self._algorithm.for_parameter, self.state)
            self.engine.rebuild(params, self._options, states)

    def _replanned(self) -> bool:
        """Plan again if the trained parameters or iterations changed on any rank, and return whether."""
        if again := self._agreed.any_rank(not self.engine.is_plan_for(self._trained_params())):
            self._build()
        return again

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch.optim.Optimizer's format, with offloaded momentum in host tensors.

        Collective, unless all parameters are plain tensors, as under DDP. Before the first step the state is empty,
        like torch's. Raises ValueError like `check_last_step`.
        """
        # Trainer and Lightning save only on rank 0 under DDP. The plan is equal on all ranks.
        self._check_last_step(alone=self._engine is None or all(p.plain for p in self.plan.parameters))
        self.synchronize()
        return super().state_dict()

    def offload(self) -> None:
        """Keep the momentum in pinned host memory from now on, as with `offload = "state"`."""
        self._move("state")

    def reload(self) -> None:
        """Keep the momentum on the device from now on."""
        self._move("none")

    def _move(self, to: Offload) -> None:
        self.build()
        if not needs_move(self._options.offload, to):
            return
        self.synchronize()
        options = replace(self._options, offload=to)
        self.engine.check(options)
        self._options = options
        self.engine.rebuild(moved(self.engine.rank.params, self.state, to), options)

    def synchronize(self) -> None:
        """Wait for momentum transfers and the last step's report."""
        if self._engine is not None:
            self._engine.synchronize()
            self._engine.rank.report.uncount_skipped()

    def close(self) -> None:
        """Destroy Muon's process groups. Collective; no step can follow."""
        if self._engine is not None:
            self._engine.free()
        self._engine, self._closed = None, True
        if self._agreement is not None:
            self._agreement.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. A built optimizer plans again, on all ranks together. Raises ValueError like the constructor."""
        alone = len(ranks_of(self.process_group)) == 1
        super().add_param_group(selection.named_group(param_group, self.param_groups, alone=alone))
        try:
            selection.check_params(self.param_groups[-1], self._options.split)
            selection.check_group_algorithm(self._options, self.param_groups[-1])
            if self._engine is not None:
                self.rebuild()
        except Exception:
            self.param_groups.pop()
            raise
        for doubt in selection.doubts_of(self.param_groups[-1], self._options.split):
            warn(doubt)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return {**super().__getstate__(), "_options": self._options, "process_group": group_name(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Optimizer.load_state_dict calls this too, with only groups and state.
        if "_options" in state:
            self._agreement, self._engine, self._closed = None, None, False
            state = {**state, "process_group": group_named(state.get("process_group"))}
            self._algorithm = selection.algorithm_of(state["_options"])
        super().__setstate__(state)

    def _build(self) -> None:
        if self._closed:
            raise ValueError("this Muon was closed, and its process groups are gone; build a new optimizer")
        self.synchronize()
        self._agreement = self._agreement or Agreement(self.process_group)
        if self._engine is not None:
            # Memory may not suffice for old and new buffers.
            self._engine.free()
        options = self._options
        try:
            with self._agreement.unchanged_after_errors(), unchanged_after_errors(self.param_groups, self.state):
                self._engine = self._planned(self._agreement)
        except BaseException:
            self._options = options
            raise

    def _planned(self, agreement: Agreement) -> Engine:
        agreed = agreement.raise_on_all_ranks
        agreed(lambda: selection.check_groups(self._options, self.param_groups))
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        self._options = replace(self._options, offload=resolved(self._options.offload, everything))
        params = agreed(self._trained_params)
        # Of all ranks, because a pipeline stage may lack the groups of an algorithm.
        names = agreement.distinct(agreed(lambda: selection.algorithms_in(self._options, self.param_groups)))
        agreed(lambda: selection.check_used(self._options, frozenset().union(*names)))
        separate = separate_layouts(params, agreement)
        selected, (plan, geometries) = agreed(lambda: self._selected_plan(params, separate, agreement.rank))
        self._options, self._algorithm = selected.options, selected.algorithm
        algorithm_for = self._algorithm.for_parameter
        params = agreed(lambda: with_states(params, plan.parameters, self.state, self._options, algorithm_for))
        of_plan = (plan, geometries, params, self._options, self.param_groups, self._others, agreement.ranks)
        report = report_of(*of_plan, optional=self._optional)
        known = {g: group for trained in params for g, group in mesh_groups(trained.param, agreement.rank).items()}
        agreement.open(report, known, device_of(params))
        overlap = None if self._engine is None else self._engine.overlap
        states = with_matrix_states(plan, params, algorithm_for, self.state)
        rest = (selected, self.transport(), agreement, states, overlap)
        engine = agreed(lambda: engine_of(plan, geometries, params, *rest, muon=self, others=self._others))
        engine.attach()
        engine.warm_up()
        return engine

    def _selected_plan(
        self, params: Sequence[TrainedParam], separate: Mapping[str, Layout], rank: int
    ) -> tuple[Selection, tuple[Plan, Geometries]]:
        groups, tensors = [trained.group for trained in params], [trained.param for trained in params]
        selected = selection.select(self._options, groups, tensors, device_of(params))
        return selected, checked_plan(params, selected, separate, rank)

    def _trained_params(self) -> tuple[TrainedParam, ...]:
        selection.check_places(named_parameters(self.param_groups))
        of_muon = self.param_groups, self.state, self._agreed.rank, self._options
        algorithm = selection.algorithm_of(self._options, self.param_groups)
        return tuple(trained_params(*of_muon, counts_steps=algorithm.counts_steps))
