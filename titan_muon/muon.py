"""Muon for any layout of its parameters: a torch.optim.Optimizer that runs a plan.

The plan is made once, at construction (`build.py`). A step runs it, in the stages that `Muon.step` shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from . import registry
from .agreement import Agreement
from .build import Built, build, iteration_of, plan_rank, rebuild, report_of, storage_faults
from .dtensor import layout_of, mesh_groups
from .exchange import Exchange
from .faults import Fault, check_faults, fault_of, names_with
from .options import HYPERPARAMETERS, Hyperparameters, Machine, MuonOptions, Split, check
from .orthogonalize import DTYPES, Iteration
from .params import LocalViews, TrainedParam, local_views, placement_key
from .plan.schedule import Act
from .plan.types import Plan


class Muon(Optimizer):
    """Momentum, orthogonalized by Newton-Schulz (Keller Jordan, 2024), for matrices in any layout.

    Equal to torch.optim.Muon on the full matrices, bit for bit with `orthogonalize="reference"` on the CPU and to the
    rounding of Newton-Schulz otherwise; the momentum is torch's exponential moving average.

    Args:
        params: (name, parameter) pairs such as `model.named_parameters()` gives, or groups with `params` and
            `param_names` (or pairs as `params`). Parameters are (m, n) matrices or (count, m, n) stacks, plain tensors
            or DTensors of any placement but partial, on a real device. Each group may have its own
            `options.Hyperparameters`. Empty on a rank that trains no matrix, in a world where others do.

    The other keywords are the fields of `options.MuonOptions`, which has the meaning and the range of each.
    All ranks of the default process group build their Muon at the same point of the program.

    Raises:
        ValueError: at construction, on every rank, for parameters without names, that are no matrices, on the meta
            device, or given twice; for unknown names and numbers out of range; when nothing is to be trained; when
            ranks plan differently. In `step`, on every rank, for a trained parameter without a gradient, with one
            that was not finite in the step before, or whose layout or Newton-Schulz iteration has changed since
            construction.
    """

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
        wire_dtype: str = "bfloat16",
        state_dtype: str = "float32",
        missing_grad: str = "error",
        nonfinite: str = "error",
        release_grads: bool = False,
        split: Sequence[Split] = (),
        buffer_bytes: int | None = None,
        machine: Machine = MuonOptions.machine,
    ) -> None:
        given = locals()
        options = MuonOptions(**{item.name: given[item.name] for item in fields(MuonOptions)})
        self._options = options
        self._collectives = registry.exchange_entry(options.exchange).collectives
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._agreement = Agreement()
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
        built = self._built
        executor, exchange, program = built.executor, built.exchange, built.planned.program
        # Stage 1, check: what is missing on one rank is an error on all, or skipped on all, before anything changes.
        views = self._check_gradients()
        executor.begin()
        # The turns are the same on every rank, so every process group sees its collectives in one order. While a round
        # is orthogonalized the next ones are being gathered, and earlier ones return.
        for act, number in program.turns:
            if act is Act.HOME:
                # Stages 2, 4 and 6 of the matrices that are whole on this rank: they travel nowhere.
                executor.step_home(views)
                continue
            for bucket in program.rounds[number]:
                if act is Act.GATHER:
                    # Stage 2, momentum: on the parameter's own storage. Stage 3, gather: pieces to their owners.
                    executor.advance_momentum(bucket, views)
                    exchange.gather(bucket)
                elif act is Act.ORTHOGONALIZE:
                    # Stage 4, orthogonalize: the owner's matrices, once whole. Stage 5, return: the mirror of stage 3.
                    exchange.wait(bucket)
                    executor.orthogonalize(bucket, views)
                    exchange.return_results(bucket)
                else:
                    # Stage 6, apply: decay and update, on the parameter's own storage.
                    exchange.wait(bucket)
                    executor.apply(bucket, views)
        # Stage 7, tell: what was not finite is on its way to the host, for the check of the next step.
        executor.finish()
        return loss

    def _check_gradients(self) -> list[LocalViews | None]:
        """The views of each parameter, None for those that every rank skips. Raises ValueError on all ranks alike."""
        built, planned = self._built, self._built.planned
        found = [
            Fault.NEWTON_SCHULZ_CHANGED if _changed(trained.group, iteration) else fault_of(trained)
            for trained, iteration in zip(planned.params, planned.iterations, strict=True)
        ]
        if built.counter is not None:
            broken = (Fault.NOT_FINITE if count else Fault.NONE for count in built.counter.read())
            found = [max(pair) for pair in zip(found, broken, strict=True)]
        # Each rank sees its own gradients alone. Were one to skip or raise by itself, others would wait for its pieces.
        faults = [Fault(code) for code in self._agreement.max_over_ranks(found)]
        self._tell_nonfinite_once(faults)
        allowed = [Fault.NOT_FINITE] if self._options.nonfinite == "skip" else []
        if self._options.missing_grad == "skip":
            allowed.append(Fault.NO_GRADIENT)
        check_faults(planned.params, faults, allowed)
        return [
            local_views(trained, parameter) if trained.here and fault != Fault.NO_GRADIENT else None
            for trained, parameter, fault in zip(planned.params, planned.plan.parameters, faults, strict=True)
        ]

    def _tell_nonfinite_once(self, faults: Sequence[Fault]) -> None:
        names, counter = names_with(self._built.planned.params, faults, Fault.NOT_FINITE), self._built.counter
        if names and counter is not None:
            counter.clear()
            if self._options.nonfinite == "skip":
                message = f"{names}: not finite; the update of those matrices was zero in a step"
                warnings.warn(message, stacklevel=4)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum. All ranks of the default process group call it together.

        Raises ValueError on every rank, before anything is loaded, for a state dict of another optimizer or of other
        parameters, and for a momentum that is missing or has another mesh or other placements than its parameter.
        """
        averages: dict[Tensor, Tensor] = {}
        fault: ValueError | None = None
        try:
            averages = dict(self._saved_averages(state_dict))
        except ValueError as error:
            fault = error
        self._agreement.raise_together(fault)
        super().load_state_dict(state_dict)
        dtype = DTYPES[self._options.state_dtype]
        for parameter, average in averages.items():
            # Optimizer.load_state_dict rounds state to the parameter's dtype, and a checkpoint may be on the host.
            loaded = average.detach().to(device=parameter.device, dtype=dtype, copy=True)
            self.state[parameter]["momentum_buffer"] = loaded
        self._resume()

    def _resume(self) -> None:
        """Go on with what was loaded. Plans again only if what is computed changed, on all ranks if on any."""
        planned, params = self._built.planned, tuple(self._trained_params())
        # What is trained may have changed too: parameters are frozen and thawed between checkpoints.
        changed = [t.fqn for t in params] != [t.fqn for t in planned.params] or any(
            _changed(t.group, iteration) for t, iteration in zip(params, planned.iterations, strict=True)
        )
        if self._agreement.any_rank(changed):
            self._plan_and_build()
        else:
            self._build = rebuild(self._built, params, self._options)

    def _saved_averages(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each trained parameter with its momentum in a state dict."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state dict has {len(groups)} parameter groups, and this Muon {len(self.param_groups)}"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            missing = [name for name in HYPERPARAMETERS if name not in saved]
            if missing:
                said = f"the state dict is of another optimizer: its groups have no {', '.join(missing)}"
                raise ValueError(f"{said}; add them to load its momentum")
            _check_group({**saved, "param_names": group["param_names"]})
            names = group["param_names"]
            if saved.get("param_names", names) != names or len(saved["params"]) != len(names):
                raise ValueError(f"the state dict is of other parameters: {saved.get('param_names')}, not {names}")
            for fqn, parameter, key in zip(names, group["params"], saved["params"], strict=True):
                if not parameter.requires_grad:
                    continue
                average = state_dict["state"].get(key, {}).get("momentum_buffer")
                if average is None or placement_key(average) != placement_key(parameter):
                    raise ValueError(f"{fqn}: the state dict has no momentum with the parameter's mesh and placements")
                yield parameter, average

    def set_timeout(self, timeout: timedelta) -> None:
        """Have the collectives of the process groups that Muon made fail after `timeout`."""
        self._agreement.set_timeout(timeout)

    def close(self) -> None:
        """Destroy the process groups that Muon made. All ranks call it together; no step can follow."""
        self._build = None
        self._agreement.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later a ValueError, since the plan holds for all parameters."""
        if self._build is not None:
            raise ValueError("Muon plans all its parameters at construction: build a new optimizer with the new group")
        super().add_param_group(param_group)

    def _plan_and_build(self) -> None:
        """Check the groups, create missing state, plan, agree and allocate: all that may fail, before any step."""
        # A new plan's buffers must not have to fit beside the old one's.
        self._build = None
        fault: ValueError | None = None
        try:
            for group in self.param_groups:
                _check_group(group)
            planned = plan_rank(tuple(self._trained_params()), self._options, self._rank)
            report = report_of(planned, self._options, self.param_groups)
            fault = next((ValueError(text) for text in storage_faults(planned)), None)
        except ValueError as error:
            fault = error
        self._agreement.raise_together(fault)
        known = {
            ranks: group
            for trained in planned.params
            for ranks, group in mesh_groups(trained.param, self._rank).items()
        }
        self._agreement.open(report, known, planned.device)
        self._build = build(planned, self._options, self._collectives(), self._agreement)

    def _trained_params(self) -> Iterator[TrainedParam]:
        seen: set[str] = set()
        for group in self.param_groups:
            for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
                if fqn in seen:
                    raise ValueError(f"{fqn}: given to Muon twice; give every parameter once")
                seen.add(fqn)
                if parameter.requires_grad:
                    yield self._trained_param(fqn, parameter, group)

    def _trained_param(self, fqn: str, parameter: Tensor, group: Mapping[str, Any]) -> TrainedParam:
        if parameter.is_meta:
            raise ValueError(f"{fqn}: on the meta device; give it storage (to_empty) before building Muon")
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            # Placed as the parameter is, so that a checkpoint reshards both alike.
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=DTYPES[self._options.state_dtype])
        here = self._rank in layout_of(fqn, parameter).mesh.ranks
        return TrainedParam(fqn, parameter, state["momentum_buffer"], group, placement_key(parameter), here)


def _changed(group: Mapping[str, Any], planned: Iteration) -> bool:
    """Whether a group's Newton-Schulz iteration is no longer the planned one."""
    try:
        return iteration_of(group) != planned
    except ValueError:
        return True


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless a group has names and hyperparameters in range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass model.named_parameters() or (name, parameter) pairs"
        )
    check(Hyperparameters, group)
    iteration_of(group)
