"""Muon for any layout of its parameters: a torch.optim.Optimizer that runs a plan.

The plan is made once, at construction. A step has six stages, each a method below: check, momentum (with packing),
gather, orthogonalize, return, apply.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from . import registry, update
from .dtensor import layout_of, local
from .exchange import Council, Exchange, Word
from .executor import Executor
from .faults import Alarm
from .matrices import check_splits, planned
from .options import Link, MuonOptions, Split
from .orthogonalize import KERNEL_CHOICES, Dispatch, Iteration, Method, iteration, kernels_for
from .params import (
    Fault,
    Member,
    Storage,
    check_faults,
    fault_of,
    faulty,
    placing,
    storage_fault,
    storage_of,
)
from .plan.cost import Work
from .plan.groups import connected
from .plan.layout import Geometries
from .plan.planner import make_plan
from .plan.program import make_program
from .plan.types import Plan

WIRE_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
STATE_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Muon(Optimizer):
    """Momentum, orthogonalized by Newton-Schulz (Keller Jordan, 2024), for matrices that rest anywhere.

    Equal to torch.optim.Muon on the full matrices, bit for bit with `orthogonalize="reference"` on the CPU and to the
    rounding of Newton-Schulz otherwise; the momentum is torch's exponential moving average.

    Args:
        params: (name, parameter) pairs such as `model.named_parameters()` gives, or groups with `params` and
            `param_names` (or pairs as `params`). Parameters are (m, n) matrices or (count, m, n) stacks, plain tensors
            or DTensors of any placement but partial, on a real device. Each group may have its own hyperparameters.
        lr: learning rate.
        momentum: decay of the average of gradients.
        nesterov: orthogonalize the gradient blended with its average.
        weight_decay: decoupled, scaled by lr.
        ns_steps: Newton-Schulz steps.
        ns_coefficients: name of a set in `orthogonalize.COEFFICIENTS`, or ns_steps triples (a, b, c).
        eps: smallest Frobenius norm that a matrix is divided by.
        lr_scale: factor on lr from the shape of a matrix, see `update.lr_scale`.
        orthogonalize: the algorithm: `auto`, the cheapest that is safe for each shape; `standard` or `gram`; or
            `reference`, torch.optim.Muon's arithmetic bit for bit. See `orthogonalize.Dispatch`.
        ns_dtype: that it computes in: `bfloat16`, `float16`, `float32`, or `auto`, by the device.
        ns_kernel: of symmetric products: `plain`, `triton`, `quack`, or `auto`, what was measured to win on this GPU.
        nonfinite: what comes of a matrix with an element that is not finite, in a gradient or the momentum. With
            `error` and `skip` its update is zero in that step, on all ranks, and the elements of its momentum that are
            not finite become zero. Then the next step raises, before it changes anything (`error`), or warns (`skip`).
            `propagate` looks for nothing.
        exchange: how pieces meet, a name in `registry.exchanges`.
        owners: who orthogonalizes what, see `plan.owners`.
        replicas: whether copies `split` the work, repeat it (`redundant`), or `auto`.
        buffer_bytes: most bytes of exchange buffers on this rank, or None for the smallest that cost no balance.
        wire_dtype: of the elements in transit; `bfloat16` loses nothing, since Newton-Schulz starts and ends in it.
        split: which parameters are cut into several matrices (heads, fused projections), see `matrices.Split`.
        missing_grad: a parameter without a gradient on some rank is an `error` on all, or all `skip` it in this step.
        release_grads: set each gradient to None once it is packed, to free its memory within the step.
        state_dtype: of the momentum, `float32` or `bfloat16`.
        link: what communication costs, for `auto`.

    All ranks of the default process group build their Muon at the same point of the program.

    Raises:
        ValueError: at construction, on every rank, for parameters without names, that are no matrices, on the meta
            device, or given twice; for unknown names and numbers out of range; when nothing is to be trained; when
            ranks plan differently. In `step`, on every rank, for a trained parameter without a gradient, with one
            that was not finite in the step before, or whose layout or Newton-Schulz iteration has changed since
            construction.
    """

    plan: Plan
    """Who orthogonalizes which matrix, and how the pieces get there and back."""

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
        buffer_bytes: int | None = None,
        wire_dtype: str = "bfloat16",
        split: Sequence[Split] = (),
        missing_grad: str = "error",
        nonfinite: str = "error",
        release_grads: bool = False,
        state_dtype: str = "float32",
        link: Link | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "lr_scale": lr_scale,
        }
        self._dispatch, self._kernel = Dispatch(orthogonalize, ns_dtype), ns_kernel
        for name, value, known in (
            ("wire_dtype", wire_dtype, WIRE_DTYPES),
            ("state_dtype", state_dtype, STATE_DTYPES),
            ("missing_grad", missing_grad, ("error", "skip")),
            ("nonfinite", nonfinite, ("error", "skip", "propagate")),
            ("ns_kernel", ns_kernel, KERNEL_CHOICES),
        ):
            if value not in known:
                raise ValueError(f"muon.{name} = {value!r} is not one of {', '.join(known)}")
        self._wire_dtype, self._state_dtype = WIRE_DTYPES[wire_dtype], STATE_DTYPES[state_dtype]
        self._splits = tuple(split)
        self._skips_missing, self._releases, self._nonfinite = missing_grad == "skip", release_grads, nonfinite
        chosen = registry.exchanges.get(exchange)
        self._collectives = chosen.collectives
        choices = {"owners": owners, "replicas": replicas, "buffer_bytes": buffer_bytes, "wire_dtype": wire_dtype}
        link = Link() if link is None else link
        self._options = MuonOptions(exchange=chosen.pattern, link=link, **choices)  # type: ignore[arg-type]
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._council = Council()
        self._built = False
        super().__init__(params, defaults)
        self._build()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum, and plan again, since hyperparameters may have changed.

        Raises ValueError, before anything is loaded, for a trained parameter whose momentum is missing or rests
        otherwise than the parameter, and for groups of other names.
        """
        averages = self._saved_averages(state_dict)
        super().load_state_dict(state_dict)
        for parameter, average in averages:
            # Optimizer.load_state_dict rounds state to the parameter's dtype.
            self.state[parameter]["momentum_buffer"] = average.detach().to(self._state_dtype, copy=True)
        self._build()

    def _saved_averages(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Each trained parameter with its momentum in a state dict."""
        averages = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            names = group["param_names"]
            if saved.get("param_names", names) != names:
                raise ValueError(f"the state dict is of other parameters: {saved['param_names']}, not {names}")
            for fqn, parameter, key in zip(names, group["params"], saved["params"], strict=False):
                if not parameter.requires_grad:
                    continue
                average = state_dict["state"].get(key, {}).get("momentum_buffer")
                if average is None or placing(average) != placing(parameter):
                    raise ValueError(f"{fqn}: the state dict has no momentum that rests as the parameter does")
                averages.append((parameter, average))
        return averages

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later a ValueError, since the plan holds for all parameters."""
        if getattr(self, "_built", False):
            raise ValueError("Muon plans all its parameters at construction: build a new optimizer with the new group")
        super().add_param_group(param_group)

    def _build(self) -> None:
        """Check the groups, create missing state, plan, agree and allocate: all that may fail, before any step."""
        # A new plan's buffers must not have to fit beside the old one's.
        for name in ("exchange", "_executor"):
            self.__dict__.pop(name, None)
        try:
            word = self._prepare()
        except ValueError as error:
            # The other ranks are told, or they would wait for this one.
            word = Word(ranks=(), groups=(), peers=(), signature="", fault=str(error))
        self._council.open(word)
        device = self._device
        self.exchange = Exchange(self._program, device, self._wire_dtype, self._collectives(), self._council)
        self._alarm = None if self._nonfinite == "propagate" else Alarm(len(self._members), device)
        # Home or not, a matrix is rounded to what the wire would carry; float16 itself would overflow at home.
        wide = torch.float32 if self._wire_dtype == torch.float32 else torch.bfloat16
        self._executor = Executor(
            self.plan,
            self._program,
            self.exchange,
            self._members,
            self._iterations,
            self._methods(),
            self._alarm,
            releases=self._releases,
            workspace=(wide, device),
        )
        self._built = True

    def _prepare(self) -> Word:
        """Everything that needs no other rank; what this rank then says to the others."""
        for group in self.param_groups:
            _check_group(group)
        self._members = tuple(self._make_members())
        if not self._members:
            raise ValueError("Muon has no parameter to train: it was given none, or all of them are frozen")
        self._iterations = tuple(_iteration(member.group) for member in self._members)
        named = [(m.fqn, m.parameter) for m in self._members]
        self._device = local(self._members[0].parameter).device
        kernels = kernels_for(self._kernel, self._device)
        self._dispatch = replace(self._dispatch, device=self._device.type, kernels=kernels)
        self.plan = plan_step(named, self._iterations, self._dispatch, self._options, self._splits)
        geometries = Geometries(self.plan.parameters)
        self._program = make_program(self.plan, self._rank, geometries)
        return self._word(geometries)

    def _methods(self) -> tuple[Method, ...]:
        """The method of each of the plan's works."""
        first = {matrix.work: matrix for matrix in reversed(self.plan.matrices)}
        chosen = (first[work] for work in range(len(self.plan.works)))
        return tuple(self._dispatch.choose(m.rows, m.cols, self._iterations[m.parameter].steps) for m in chosen)

    def _make_members(self) -> Iterable[Member]:
        seen: set[str] = set()
        for group in self.param_groups:
            for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
                if fqn in seen:
                    raise ValueError(f"{fqn}: given to Muon twice; give every parameter once")
                seen.add(fqn)
                if not parameter.requires_grad:
                    continue
                if parameter.is_meta:
                    raise ValueError(f"{fqn}: on the meta device; give it storage (to_empty) before building Muon")
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self._state_dtype)
                here = self._rank in layout_of(fqn, parameter).mesh.ranks
                yield Member(fqn, parameter, state["momentum_buffer"], group, placing(parameter), here)

    def _word(self, geometries: Geometries) -> Word:
        """What the ranks have to agree on before the first step."""
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.param_groups]
        faults = (
            storage_fault(member.fqn, member.parameter, geometries[index], self._rank)
            for index, member in enumerate(self._members)
        )
        return Word(
            ranks=tuple(sorted({rank for parameter in self.plan.parameters for rank in parameter.layout.mesh.ranks})),
            groups=tuple(dict.fromkeys(run.bucket.group for run in self._program.buckets)),
            peers=connected(self._rank, self._shared()),
            signature=f"{self.plan.digest()} {self._wire_dtype} {self._skips_missing} {self._nonfinite} {groups}",
            fault=next((fault for fault in faults if fault is not None), None),
        )

    def _shared(self) -> Iterator[tuple[int, ...]]:
        """The sets of ranks that must agree in each step on which gradients there are.

        Copies of a DTensor that are orthogonalized at home get their gradients from one collective, all of them or
        none, so that such a step may be silent.
        """
        yield from (bucket.group for bucket in self.plan.buckets)
        for matrix, ranks in zip(self.plan.matrices, self.plan.home, strict=True):
            if len(ranks) > 1 and (self.plan.parameters[matrix.parameter].plain or self._skips_missing):
                yield ranks

    @property
    def orthogonalized(self) -> int:
        """Matrices that this rank orthogonalized in the last step."""
        return self._executor.orthogonalized

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
        storage = self._check()
        self._executor.run(storage)
        return loss

    def _check(self) -> list[Storage | None]:
        """Stage 1: all gradients. What is wrong on one rank is an error on all, or skipped on all (None)."""
        programmed = zip(self._members, self._iterations, strict=True)
        found = [Fault.REPROGRAMMED if _changed(m.group, planned) else fault_of(m) for m, planned in programmed]
        if self._alarm is not None:
            broken = (Fault.NOT_FINITE if count else Fault.NONE for count in self._alarm.read())
            found = [max(pair) for pair in zip(found, broken, strict=True)]
        faults = [Fault(code) for code in self._council.worst(found)]
        self._silence(faults)
        left = [Fault.NOT_FINITE] if self._nonfinite == "skip" else []
        check_faults(self._members, faults, [*left, Fault.NO_GRADIENT] if self._skips_missing else left)
        members = zip(self._members, self.plan.parameters, faults, strict=True)
        return [
            storage_of(m, parameter) if m.here and fault != Fault.NO_GRADIENT else None
            for m, parameter, fault in members
        ]

    def _silence(self, faults: Sequence[Fault]) -> None:
        """What was not finite is told once."""
        names = faulty(self._members, faults, Fault.NOT_FINITE)
        if names and self._alarm is not None:
            self._alarm.clear()
            if self._nonfinite == "skip":
                warnings.warn(f"{names}: not finite; the update of those matrices was zero in a step", stacklevel=4)


def plan_step(
    named: Sequence[tuple[str, Tensor]],
    iterations: Sequence[Iteration],
    dispatch: Dispatch,
    options: MuonOptions,
    splits: Sequence[Split] = (),
) -> Plan:
    """The plan of a Muon step on these (name, parameter) pairs, each with its Newton-Schulz iteration.

    Parameters may be on the meta device and on a mesh of the fake process group: nothing is communicated. Raises
    ValueError for a parameter that is no stack of matrices, and for a split that matches nothing or does not fit.
    """
    check_splits((fqn for fqn, _ in named), splits)
    parameters = [planned(fqn, tensor, splits) for fqn, tensor in named]
    return make_plan(parameters, lambda index, rows, cols: _work(iterations[index], rows, cols, dispatch), options)


def _work(computed: Iteration, rows: int, cols: int, dispatch: Dispatch) -> Work:
    """What orthogonalizing a matrix costs by the method that will run."""
    method = dispatch.choose(rows, cols, computed.steps)
    flops, taken = method.flops(rows, cols, computed.steps), method.work_bytes(rows, cols, dispatch.device)
    return Work(f"{method}; {computed}", flops, method.reason, method.stack, taken)


def _iteration(group: Mapping[str, Any]) -> Iteration:
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def _changed(group: dict[str, Any], planned: Iteration) -> bool:
    """Whether a group's Newton-Schulz iteration is no longer the planned one."""
    try:
        return _iteration(group) != planned
    except ValueError:
        return True


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless a group has names and hyperparameters in range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass model.named_parameters() or (name, parameter) pairs"
        )
    for name, least, below in (("lr", 0.0, math.inf), ("momentum", 0.0, 1.0), ("weight_decay", 0.0, math.inf)):
        if not least <= group[name] < below:
            raise ValueError(f"muon.{name} = {group[name]} is not in [{least}, {below})")
    if not group["eps"] > 0:
        raise ValueError(f"muon.eps = {group['eps']} must be greater than 0")
    update.lr_scale(group["lr_scale"], 1, 1)
    _iteration(group)
