"""Muon for any layout of its parameters: a torch.optim.Optimizer that runs a plan.

The plan is made once, at construction. A step runs it by the engine (`engine.py`), stage by stage (`step/stages.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from . import registry
from .comm.agreement import Agreement
from .comm.exchange import Exchange
from .comm.faults import STORAGE_FAULTS, Fault, check_faults, names_with
from .comm.replicas import unequal_tensors
from .engine import Engine, engine_of, report_of
from .options import HYPERPARAMETERS, Machine, MuonOptions, Offload, Split
from .plan.terms.layout import Geometries
from .plan.terms.types import Plan
from .planning import check_storage, device_of, plan_of
from .rules import rule_of
from .state.groups import checked
from .state.host import moves, with_offload
from .state.momentum import copy_average, moved, with_states
from .state.rule_states import MatrixStates, saved_rule_states, with_rule_states
from .state.saved import saved_averages
from .step.feature import Feature
from .step.gradients import Step
from .tensors.dtensor import mesh_groups
from .tensors.storage import STEP, TrainedParam, trained_params


class Muon(Optimizer):
    """Momentum, orthogonalized by Newton-Schulz (Keller Jordan, 2024), for matrices in any layout.

    Equal to torch.optim.Muon on the full matrices, bit for bit with `orthogonalize="reference"` on the CPU and to the
    rounding of Newton-Schulz otherwise; the momentum is torch's exponential moving average.

    Args:
        params: (name, parameter) pairs such as `model.named_parameters()` gives, or groups with `params` and
            `param_names` (or pairs as `params`). Parameters are (m, n) matrices or (count, m, n) stacks, plain tensors
            (on several ranks, as under DDP, each does a part; build Muon once DDP has made them equal) or DTensors of
            any placement but partial, on a real device. Each group may have its own `options.Hyperparameters`. Empty
            on a rank that trains no matrix, in a world where others do.

    The other keywords are the fields of `options.MuonOptions`, which has the meaning and the range of each.
    All ranks of the default process group build their Muon at the same point of the program.

    Raises:
        ValueError: at construction, on every rank, for parameters without names, that are no matrices, on the meta
            device, or given twice; for unknown names and numbers out of range; when nothing is to be trained; when
            ranks plan differently. In `step`, on every rank, for a trained parameter without a gradient, with one
            that was not finite in the step before, or whose layout or Newton-Schulz iteration has changed since
            construction.
    """

    # torch.amp.GradScaler then has every step taken, and says on the device whether it may change anything.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[Sequence[float]] = "keller_jordan",
        eps: float = 1e-7,
        lr_scale: str = "match_rms_adamw",
        rule: str = "muon",
        beta2: float = 0.95,
        cautious: bool = False,
        orthogonalize: str = "auto",
        ns_dtype: str = "auto",
        ns_kernel: str = "auto",
        exchange: str = "all_to_all",
        owners: str = "balanced",
        replicas: str = "split",
        split_over: int | str = 1,
        tensor_parallel: str = "owner",
        wire_dtype: str = "bfloat16",
        state: str = "replicated",
        state_dtype: str = "float32",
        rounding: str = "stochastic",
        missing_grad: str = "error",
        nonfinite: str = "error",
        release_grads: bool = False,
        overlap: str = "none",
        split: Sequence[Split] = (),
        buffer_bytes: int | None = None,
        machine: Machine = MuonOptions.machine,
        offload: Offload = "none",
    ) -> None:
        given = locals()
        options = MuonOptions(**{item.name: given[item.name] for item in fields(MuonOptions)})
        self._options = options
        self._collectives = registry.exchange_entry(options.exchange).collectives
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._agreement = Agreement()
        self._engine: Engine | None = None
        # A rank may have no matrix where others have some; torch refuses an empty list, but not an empty group.
        given_params = list(params) or [{"params": [], "param_names": []}]
        super().__init__(given_params, {name: getattr(options, name) for name in HYPERPARAMETERS})
        self._build()

    @property
    def plan(self) -> Plan:
        """Who orthogonalizes which matrix, and how the pieces get there and back."""
        return self.engine.rank.plan

    @property
    def exchange(self) -> Exchange:
        """The collectives, with a count of what they sent."""
        return self.engine.rank.exchange

    @property
    def orthogonalized(self) -> int:
        """Number of matrices that this rank orthogonalized in the last step."""
        return self.engine.rank.orthogonalized

    @property
    def engine(self) -> Engine:
        """The engine that runs this rank's part of the plan."""
        assert self._engine is not None, "Muon was not built: its construction, or the loading of its state, has failed"
        return self._engine

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters. Every rank that holds some of them must call it.

        Args:
            closure: computes the loss and the gradients anew, if given.

        Returns:
            The value that the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.flush()
        step = self._checked()
        self.engine.run(step, *self._features_of_step())
        for group in self.param_groups:
            if STEP in group:
                group[STEP] += 1
        return loss

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Put the last backward before a step in this context: by `overlap = "backward"`, gathers start in it.

        All ranks enter it together, and leave gradients as they are until the step. Otherwise nothing happens.
        """
        with ExitStack() as stack:
            for feature in self.engine.features:
                stack.enter_context(feature.backward())
            yield

    def finish_step(self) -> None:
        """Apply what the last step has left to the next forward, by `overlap = "forward"`. Otherwise nothing happens.

        For code that reads or writes weights before that forward. State dicts do it by themselves.
        """
        if self._engine is not None:
            self._engine.flush()

    def _features_of_step(self) -> Iterator[Feature]:
        """Features of this step alone: torch.amp.GradScaler sets `found_inf` for the time of a step."""
        if getattr(self, "found_inf", None) is not None:
            from .features.scaling import GradScaling

            yield GradScaling(self, self.engine.rank)

    def _checked(self) -> Step:
        """The gradients of this step. Raises ValueError on all ranks alike, before anything changes."""
        if getattr(self, "found_inf", None) is not None:
            from .features.scaling import GradScaling

            GradScaling.check(self._options)
        engine, rank = self.engine, self.engine.rank
        for feature in engine.features:
            feature.ready()
        found, moved = engine.faults(self.param_groups, self.state)
        if self._agrees_first:
            # Before anything is exchanged: if one rank skipped or raised alone, others would wait for its shards.
            found = [Fault(code) for code in self._agreement.max_over_ranks(found)]
            self._raise_faults([max(pair) for pair in zip(found, rank.report.read(), strict=True)])
        else:
            # A rank cannot raise alone, nor ask the others without waiting for them. It goes on without the faulty
            # gradients, whose matrices get no update anywhere, and all ranks raise in the next step.
            self._raise_faults(rank.report.read())
            rank.report.add(found)
        stepped = {Fault.NONE} if self._agrees_first else {Fault.NONE, Fault.NO_GRADIENT}
        excluded = frozenset(index for index, fault in enumerate(found) if fault not in stepped)
        if STORAGE_FAULTS.isdisjoint(found) and moved:
            # For example after `param.data = ...`: views of the old storage would train the old weights.
            self._engine = engine.rebuilt(rank.params, self._options, self._agreement)
        return Step.of(rank.params, rank.plan.parameters, excluded)

    @property
    def _agrees_first(self) -> bool:
        """Whether the host asks the other ranks about gradients in each step, or has none to ask."""
        # All ranks exclude a parameter only if they know of it before their momentum changes.
        return self._agreement.peers is None or self._options.missing_grad == "skip"

    def check_last_step(self) -> None:
        """Raise ValueError for gradients that were missing or not finite in the last step, as the next step would.

        All ranks call it together, and wait for the device: before weights are saved, and at the end of training.
        `state_dict` calls it. It also does what `finish_step` does.
        """
        self.finish_step()
        if self._engine is not None:
            self._raise_faults(self._engine.rank.report.read())

    def _raise_faults(self, faults: Sequence[Fault]) -> None:
        """Raise ValueError for faults that are the same on all ranks; warn of those that the options allow."""
        rank = self.engine.rank
        chosen = {Fault.NOT_FINITE: self._options.nonfinite, Fault.NO_GRADIENT: self._options.missing_grad}
        rank.report.clear()
        if not any(faults):
            return
        for feature in self.engine.features:
            feature.told(faults)
        rank.heal(faults)
        check_faults(rank.params, faults, [fault for fault, choice in chosen.items() if choice == "skip"])
        if names := names_with(rank.params, faults, Fault.NOT_FINITE):
            warnings.warn(f"{names}: not finite; the update of those matrices was zero in a step", stacklevel=4)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum. All ranks of the default process group call it together.

        Raises ValueError on every rank, before anything is loaded, for a state dict of another optimizer or of other
        parameters, and for a momentum that is missing or has another mesh or other placements than its parameter.
        """
        # What was thawed has its momentum then, on the ranks that are to keep it.
        self._replanned()
        current = {trained.param: trained.momentum for trained in self.engine.rank.params}
        found = self._agreement.together(lambda: list(saved_averages(self.param_groups, state_dict, current)))
        saved = {each.key: each for each in found}
        given = {each.param: state_dict["state"][each.key] for each in found}
        params = self.engine.rank.params
        # The momentum that steps use: a state dict shares its dicts with the optimizer, and may have other tensors.
        before = {param: {**self.state[param], "momentum_buffer": average} for param, average in current.items()}
        of_rule = self._agreement.together(lambda: saved_rule_states(params, before, given))
        self._synchronize()
        # Optimizer.load_state_dict rounds state to the parameter's dtype, and brings all of it to its device at once.
        others = {key: state for key, state in state_dict["state"].items() if key not in saved}
        super().load_state_dict({**state_dict, "state": others})
        for each in saved.values():
            # In place, since there may not be room for all of it twice.
            copy_average(each.average, current[each.param], each.param)
        for kept, loaded in of_rule:
            kept.copy_(loaded)
        self.state.update(before)
        if not self._replanned():
            self._engine = self.engine.rebuilt(
                self._trained_params(), self._options, self._agreement, self._rule_states(self.plan)
            )

    def _rule_states(self, plan: Plan) -> MatrixStates:
        """The states of the rule on this rank, made where they are missing. All ranks call it together."""
        specs, params = rule_of(self._options).states, self._trained_params()
        return with_rule_states(plan, Geometries(plan.parameters), params, specs, self.state) if specs else {}

    def _replanned(self) -> bool:
        """Plan again if what is computed has changed, on all ranks if on any. Returns whether it has."""
        again = self._agreement.any_rank(not self.engine.plans(self._trained_params()))
        if again:
            self._build()
        return again

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's; momentum that is offloaded is there as tensors of the host.

        All ranks call it together. Raises ValueError as `check_last_step`.
        """
        self.check_last_step()
        self._synchronize()
        return super().state_dict()

    def offload(self) -> None:
        """Keep the momentum on the host from now on: pinned, and brought to the device bucket by bucket in a step."""
        self._move("state")

    def reload(self) -> None:
        """Keep the momentum on the device from now on."""
        self._move("none")

    def _move(self, to: Offload) -> None:
        if not moves(self._options.offload, to):
            return
        self._synchronize()
        self._options = with_offload(self.plan, self._options, to)
        params = moved(self.engine.rank.params, self.plan.parameters, self.state, self._options)
        self._engine = self.engine.rebuilt(params, self._options, self._agreement)

    def _synchronize(self) -> None:
        """Have the host wait for the momentum that is on its way to it; gathers that backward launched are dropped."""
        if self._engine is not None:
            self._engine.flush(discard=True)

    def set_timeout(self, timeout: timedelta) -> None:
        """Have the collectives of the process groups that Muon made fail after `timeout`."""
        self._agreement.set_timeout(timeout)

    def close(self) -> None:
        """Destroy the process groups that Muon made. All ranks call it together; no step can follow."""
        self.finish_step()
        self._engine = None
        self._agreement.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later a ValueError, since the plan holds for all parameters."""
        if self._engine is not None:
            raise ValueError("Muon plans all its parameters at construction: build a new optimizer with the new group")
        super().add_param_group(param_group)

    def _build(self) -> None:
        """Check the groups, plan, agree and allocate: all that may fail, before any step."""
        self.finish_step()
        # The buffers of a new plan must not have to fit beside the old ones.
        previous = () if self._engine is None else self._engine.features
        self._engine = None
        self._options = self._agreement.together(lambda: checked(self.param_groups, self._options))
        params = self._agreement.together(self._trained_params)
        own = unequal_tensors(params, self._agreement)
        plan, geometries = self._agreement.together(lambda: self._plan_of(params, own))
        params = with_states(params, plan.parameters, self.state, self._options)
        report = report_of(plan, geometries, params, self._options, self.param_groups)
        known = {ranks: group for trained in params for ranks, group in mesh_groups(trained.param, self._rank).items()}
        self._agreement.open(report, known, device_of(params))
        collectives = self._collectives()
        states = self._rule_states(plan)
        self._engine = engine_of(
            plan, geometries, params, self._options, collectives, self._agreement, states, previous
        )

    def _plan_of(self, params: Sequence[TrainedParam], own: Collection[str]) -> tuple[Plan, Geometries]:
        """The plan, and the pieces of its parameters. Raises ValueError for storage that is not as planned."""
        plan = plan_of(params, self._options, own)
        geometries = Geometries(plan.parameters)
        check_storage(params, geometries, self._options, self._rank)
        return plan, geometries

    def _trained_params(self) -> tuple[TrainedParam, ...]:
        stochastic = self._options.rounding == "stochastic"
        return tuple(trained_params(self.param_groups, self.state, self._rank, stochastic=stochastic))
