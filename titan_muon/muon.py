"""Muon for any layout of its parameters: a torch.optim.Optimizer that runs a plan.

The plan is made once, at construction (`build.py`). A step runs it, in the stages that `Muon.step` shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from . import registry
from .build import Built, build, faults_here, plan_changed, plan_rank, rebuild, report_of
from .comm.agreement import Agreement
from .comm.exchange import Exchange
from .comm.faults import STORAGE_FAULTS, Fault, check_faults, names_with
from .comm.replicas import not_copies
from .features.late import Deferred
from .options import HYPERPARAMETERS, Machine, MuonOptions, Offload, Split
from .plan.terms.schedule import Act
from .plan.terms.types import Plan
from .state.groups import checked
from .state.host import moves, with_offload
from .state.momentum import copy_average, moved, with_states
from .state.saved import saved_averages
from .step.gradients import Gradients, gradients
from .step.scaling import Scaling
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
        self.deferred = Deferred(active=options.overlap == "forward")
        self._build: Built | None = None
        # A rank may have no matrix where others have some; torch refuses an empty list, but not an empty group.
        given_params = list(params) or [{"params": [], "param_names": []}]
        super().__init__(given_params, {name: getattr(options, name) for name in HYPERPARAMETERS})
        self._plan_and_build()

    @property
    def plan(self) -> Plan:
        """Who orthogonalizes which matrix, and how the pieces get there and back."""
        return self._built.planned.plan

    @property
    def exchange(self) -> Exchange:
        """Buffers, collectives, and the count of what they sent."""
        return self._built.exchange

    @property
    def orthogonalized(self) -> int:
        """Matrices that this rank orthogonalized in the last step."""
        return self._built.executor.orthogonalized

    @property
    def _built(self) -> Built:
        assert self._build is not None, "Muon was not built: its construction, or the loading of its state, has failed"
        return self._build

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters. Every rank that holds some of them must call it.

        Args:
            closure: computes the loss and the gradients anew, if given.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_step()
        # Stage 1, check: what was wrong in the last step on one rank is an error on all, before anything changes.
        grads = self._check_gradients()
        built = self._built
        executor, exchange, overlap, program = built.executor, built.exchange, built.overlap, built.planned.program
        executor.begin(grads)
        # The turns are the same on every rank, so every process group sees its collectives in one order. While a round
        # is orthogonalized the next ones are being gathered, and earlier ones return.
        for act, number in program.turns:
            if act is Act.HOME:
                # Stages 2, 4 and 6 of the matrices that are whole on this rank: they travel nowhere.
                executor.step_home(grads)
                continue
            for bucket in program.rounds[number]:
                if act is Act.GATHER:
                    # Stage 2, momentum: on the parameter's own storage; what is offloaded comes before its stage and
                    # goes back behind it. Stage 3, gather: pieces to their owners, unless they went in backward.
                    overlap.gather(bucket, executor, grads)
                elif act is Act.ORTHOGONALIZE:
                    # Stage 4, orthogonalize: the owner's matrices, once whole. Stage 5, return: the mirror of stage 3.
                    exchange.wait(bucket)
                    executor.orthogonalize(bucket, grads)
                    exchange.return_results(bucket)
                else:
                    # Stage 6, apply: decay and update, on the parameter's own storage; or in the next forward.
                    self.deferred.apply(bucket, built, grads)
        # Stage 7, tell: what was missing or not finite is on its way to all ranks, for the check of the next step.
        executor.finish()
        overlap.finish()
        self.deferred.end(built)
        for group in self.param_groups:
            if STEP in group:
                group[STEP] += 1
        return loss

    def overlap(self) -> AbstractContextManager[None]:
        """Put the last backward before a step in this context: by `overlap = "backward"`, gathers start in it.

        All ranks enter it together, and leave gradients as they are until the step. Otherwise nothing happens.
        """
        built = self._built
        return built.overlap.backward(built.planned, built.executor)

    def finish_step(self) -> None:
        """Apply what the last step has left to the next forward, by `overlap = "forward"`. Otherwise nothing happens.

        For whoever reads or writes weights in between, but for state dicts, which do so by themselves.
        """
        self.deferred.finish_all()

    def _check_gradients(self) -> Gradients:
        """The gradients of this step, without those that are left alone. Raises ValueError on all ranks alike."""
        built, params = self._built, self._built.planned.params
        scaling = Scaling.asked_of(self, built.planned.device)
        self.deferred.check(built, scaling)
        built.overlap.settle()
        found, elsewhere = faults_here(built, self.param_groups, self.state)
        found = built.overlap.checked(found, params, scaling)
        if self._agrees_first:
            # Before anything is exchanged: were one rank to skip or raise by itself, others would wait for its pieces.
            found = [Fault(code) for code in self._agreement.max_over_ranks(found)]
            self._raise_faults([max(pair) for pair in zip(found, built.faults.read(), strict=True)])
        else:
            # A rank cannot raise alone, nor ask the others without waiting for them. It goes on without these
            # gradients, whose matrices get no update anywhere, and all ranks raise in the next step.
            self._raise_faults(built.faults.read())
            built.faults.add(found)
        stepped = {Fault.NONE} if self._agrees_first else {Fault.NONE, Fault.NO_GRADIENT}
        left = frozenset(index for index, fault in enumerate(found) if fault not in stepped)
        if STORAGE_FAULTS.isdisjoint(found) and elsewhere:
            # Such as after `param.data = ...`: the step follows, since views of the old storage would train that.
            self._build = rebuild(built, params, self._options)
        return gradients(params, built.planned.plan.parameters, left, scaling)

    @property
    def _agrees_first(self) -> bool:
        """Whether the host asks the other ranks about gradients in each step, or has none to ask."""
        # A parameter is left alone by all ranks only if they know before their momentum changes. And what is missing is
        # sent as NaN, which must not get into the weights where NaN is let be.
        options = self._options
        return self._agreement.peers is None or options.missing_grad == "skip" or options.nonfinite == "propagate"

    def check_last_step(self) -> None:
        """Raise ValueError for what was missing or not finite in the last step, as the next step would.

        All ranks call it together, and wait for the device: before weights are saved, and at the end of training.
        `state_dict` calls it. It also does what `finish_step` does.
        """
        self.finish_step()
        if self._build is not None:
            self._raise_faults(self._build.faults.read())

    def _raise_faults(self, faults: Sequence[Fault]) -> None:
        """Raise ValueError for faults that are the same on all ranks; warn of those that the options allow."""
        params = self._built.planned.params
        chosen = {Fault.NOT_FINITE: self._options.nonfinite, Fault.NO_GRADIENT: self._options.missing_grad}
        self._built.faults.clear()
        self._built.executor.heal(faults)
        self._built.overlap.abandon(faults)
        check_faults(params, faults, [fault for fault, choice in chosen.items() if choice == "skip"])
        if names := names_with(params, faults, Fault.NOT_FINITE):
            warnings.warn(f"{names}: not finite; the update of those matrices was zero in a step", stacklevel=4)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum. All ranks of the default process group call it together.

        Raises ValueError on every rank, before anything is loaded, for a state dict of another optimizer or of other
        parameters, and for a momentum that is missing or has another mesh or other placements than its parameter.
        """
        # What was thawed has its momentum then, on the ranks that are to keep it.
        self._replanned()
        current = {trained.param: trained.momentum for trained in self._built.planned.params}
        found = self._agreement.together(lambda: list(saved_averages(self.param_groups, state_dict, current)))
        saved = {each.key: each for each in found}
        self._synchronize()
        # Optimizer.load_state_dict rounds state to the parameter's dtype, and brings all of it to its device at once.
        others = {key: state for key, state in state_dict["state"].items() if key not in saved}
        super().load_state_dict({**state_dict, "state": others})
        for each in saved.values():
            # In place, since there may not be room for all of it twice.
            copy_average(each.average, current[each.param], each.param)
            self.state[each.param]["momentum_buffer"] = current[each.param]
        if not self._replanned():
            self._build = rebuild(self._built, self._trained_params(), self._options)

    def _replanned(self) -> bool:
        """Plan again if what is computed has changed, on all ranks if on any. Returns whether it has."""
        changed = plan_changed(self._built.planned, self._trained_params())
        if again := self._agreement.any_rank(changed):
            self._plan_and_build()
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
        self._options = with_offload(self._built.planned.plan, self._options, to)
        planned = self._built.planned
        params = moved(planned.params, planned.plan.parameters, self.state, self._options)
        self._build = rebuild(self._built, params, self._options)

    def _synchronize(self) -> None:
        """Have the host wait for the momentum that is on its way to it; gathers that backward launched are dropped."""
        self.finish_step()
        if self._build is not None:
            self._build.overlap.cancel()
            self._build.executor.residence.synchronize()

    def set_timeout(self, timeout: timedelta) -> None:
        """Have the collectives of the process groups that Muon made fail after `timeout`."""
        self._agreement.set_timeout(timeout)

    def close(self) -> None:
        """Destroy the process groups that Muon made. All ranks call it together; no step can follow."""
        self.finish_step()
        self._build = None
        self._agreement.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later a ValueError, since the plan holds for all parameters."""
        if self._build is not None:
            raise ValueError("Muon plans all its parameters at construction: build a new optimizer with the new group")
        super().add_param_group(param_group)

    def _plan_and_build(self) -> None:
        """Check the groups, create missing state, plan, agree and allocate: all that may fail, before any step."""
        self.finish_step()
        # A new plan's buffers must not have to fit beside the old one's.
        self._build = None
        self._options = self._agreement.together(lambda: checked(self.param_groups, self._options))
        params = self._agreement.together(self._trained_params)
        own = not_copies(params, self._agreement)
        planned = self._agreement.together(lambda: plan_rank(params, self._options, self._rank, own))
        planned = replace(planned, params=with_states(params, planned.plan.parameters, self.state, self._options))
        report = report_of(planned, self._options, self.param_groups)
        known = {
            ranks: group
            for trained in planned.params
            for ranks, group in mesh_groups(trained.param, self._rank).items()
        }
        self._agreement.open(report, known, planned.device)
        self._build = build(planned, self._options, self._collectives(), self._agreement)

    def _trained_params(self) -> tuple[TrainedParam, ...]:
        stochastic = self._options.rounding == "stochastic"
        return tuple(trained_params(self.param_groups, self.state, self._rank, stochastic=stochastic))
