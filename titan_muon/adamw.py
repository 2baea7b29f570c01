"""AdamW, optionally with states on the host and in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from .engine.exchange.agreement import Agreement
from .engine.faults.faults import ALLOWED, REMEDIES, Fault, check_faults, warn_of_skipped
from .engine.faults.report import FaultReport
from .engine.faults.skip import SkipsSteps
from .engine.state.saved import after_pre_hooks, checked_state
from .engine.state.states import moved_state, needs_move, new_state, resolved
from .engine.step.foreach import batched_by_kind
from .engine.step.gradients import nonfinite
from .engine.tensors.dtensor import is_host, local, on_device, step_device
from .engine.tensors.names import named_parameters, names_in
from .engine.tensors.storage import placement_key
from .options import NO_EXPERT, SLOWEST_IN_BFLOAT16, Expert, Offload, OnBadGradient, OptionError, StateDtype, check

BATCH_BYTES = 2**26
"""Limit on the bytes of converted states."""

VECTOR = 64
"""Alignment of parts, because CPU kernels give different bits for incomplete vectors."""

AVERAGES = ("exp_avg", "exp_avg_sq")

MOVED: Mapping[Offload, tuple[str, ...]] = {
    "none": (),
    "state": AVERAGES,
    "parameters": (*AVERAGES, "param", "grad"),
}
"""Fields of AdamElements on the host."""


class AdamElements(NamedTuple):
    """Some or all of a parameter's elements on this rank."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in both averages."""
        return self.exp_avg.element_size() + self.exp_avg_sq.element_size()


class GradientFaults:
    """Reports missing and non-finite gradients of an AdamW: with the report of a Muon, or alone."""

    def __init__(self, adamw: Any) -> None:
        self._adamw = adamw
        self.reporter: Any = None
        self._follows = False
        self.expect_gradients()
        self._own: FaultReport | None = None
        self._places = list[int]()
        self._numbers = torch.empty(0, dtype=torch.int64, device="cpu")

    def report_with(self, muon: Any, *, follows: bool) -> None:
        """Use the report of `muon` from now on. `follows`: whether AdamW steps after `muon`."""
        self.reporter, self._follows = muon, follows

    @property
    def params(self) -> list[Tensor]:
        return [parameter for group in self._adamw.param_groups for parameter in group["params"]]

    @property
    def device(self) -> torch.device:
        return next(map(step_device, self.params), torch.device("cpu"))

    def expect_gradients(self) -> None:
        """Expect gradients of the parameters that are not frozen now."""
        # By place, because for example Accelerate replaces the parameters of groups.
        self._frozen = [not parameter.requires_grad for parameter in self.params]

    def check(self, skipped: Tensor | None, *, scaled: bool) -> Tensor:
        """Raise ValueError for the last step, and report the gradients of this step.

        `skipped`: whether the step changes nothing anyway. `scaled`: whether a GradScaler has checked the gradients.
        Returns () bool on the device: whether a gradient on this rank is bad.
        """
        report, start = self._report()
        params = self.params
        grads, missing = [parameter.grad for parameter in params], False
        if any(grad is None for grad in grads) or any(self._frozen):
            faults = [self._fault(p, frozen=frozen) for p, frozen in zip(params, self._frozen, strict=True)]
            if report.is_shared:
                report.add(faults, start)
            else:
                self._adamw.on_faults(faults)
            missing = Fault.NO_GRADIENT in faults
        broken = torch.full((), missing, device=report.device)
        if not scaled:
            held = (None if grad is None else local(grad) for grad in grads)
            numbers, not_finite = nonfinite(held, math.inf, report.device)
            places = [start + number for number in numbers]
            if self._places != places or self._numbers.device != report.device:
                indices = torch.tensor(places, dtype=torch.int64, device="cpu")
                self._places, self._numbers = places, on_device(indices, report.device)
            # A norm over all gradients has its own error.
            faulty = not_finite if skipped is None else not_finite & ~skipped
            report.add_where(self._numbers, faulty, Fault.NOT_FINITE)
            broken = broken | not_finite.any()
        if self.reporter is None:
            report.send()
        return broken

    def _report(self) -> tuple[FaultReport, int]:
        if self.reporter is not None:
            # A Muon that steps before AdamW has raised, and the host would wait for the report of this step.
            if not self._follows:
                self.reporter.engine.raise_pending()
            report = self.reporter.engine.rank.report
            return report, report.start_of(self._adamw)
        if self._own is None:
            self._own = FaultReport(self._adamw.names(), {}, {}, self.device, Agreement())
        faults = self._own.read()
        self._own.clear()
        if any(faults):
            self._adamw.on_faults(faults)
        return self._own, 0

    def _fault(self, parameter: Tensor, *, frozen: bool) -> Fault:
        if frozen and parameter.requires_grad and self.reporter is not None:
            return Fault.THAWED
        if parameter.grad is not None or frozen or self._adamw.expert.skips_missing:
            return Fault.NONE
        # Outside of the mesh, and where Megatron-FSDP keeps no rows.
        nothing = isinstance(parameter, DTensor) and local(parameter).numel() == 0
        return Fault.NONE if nothing else Fault.NO_GRADIENT


class AdamW(SkipsSteps, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), with the bits of torch.optim.AdamW unless `state_dtype` is set.

    Further keywords are torch's. With `state_dtype`, a step updates parts of bounded size.

    Args:
        state_dtype: dtype of the averages. The arithmetic is in the parameter's dtype.
        offload: keep the averages in host memory, as `Muon(offload=)`. A step moves them to the device whole.
        on_bad_gradient: a missing gradient raises; after a non-finite gradient, a step of this rank changes nothing,
            and the next step raises. `skip_missing`: a parameter without a gradient stays unchanged, as under torch.
            `skip_step`: a bad gradient on any rank skips the step on all ranks of `process_group`, which all call
            `step`, and the next step warns.

    In a Hybrid, all ranks raise in the next step. Alone, a rank raises at once for a missing gradient.

    Raises:
        OptionError: for an unsupported keyword, or a beta above SLOWEST_IN_BFLOAT16 with bfloat16 averages.
    """

    state_dtype: StateDtype = "parameter"
    offloaded: Offload = "none"
    expert: Expert = NO_EXPERT
    _broken: Tensor | None = None

    def __init__(
        self,
        params: Any,
        *,
        state_dtype: StateDtype = "parameter",
        offload: Offload = "none",
        on_bad_gradient: OnBadGradient = "error",
        **options: Any,
    ) -> None:
        self.state_dtype, self.offloaded = state_dtype, offload
        check(Expert, {"on_bad_gradient": on_bad_gradient})
        self.expert = Expert(on_bad_gradient=on_bad_gradient)
        super().__init__(params, **options)
        # Now, because a parameter that is frozen later lacks a gradient.
        self.gradient_faults = GradientFaults(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[name]:
                raise OptionError(name, "= True is not accepted; use torch.optim.AdamW for this option")
        if self.state_dtype == "bfloat16" and max(group["betas"]) > SLOWEST_IN_BFLOAT16:
            problem = f"each at most {SLOWEST_IN_BFLOAT16}, because bfloat16 would round changes of the averages away"
            raise OptionError("betas", f"= {list(group['betas'])} are not accepted with state_dtype: {problem}")
        if self.gradient_faults.reporter is not None:
            raise ValueError("Hybrid takes the parameters of its model: build a new Hybrid for more of them")
        super().add_param_group(param_group)
        del self.gradient_faults
        self.offloaded = resolved(self.offloaded, self.param_groups[-1]["params"])

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        options = {name: getattr(self, name) for name in ("state_dtype", "offloaded", "expert")}
        return {**super().__getstate__(), **options}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        device = self.gradient_faults.device
        scaling = self.take_scaling(device, alone=True)
        flags = [] if scaling is None else [scaling.skipped]
        flags += [] if self._broken is None else [self._broken.to(device)]
        skipped = torch.stack(flags).any() if flags else None
        if skipped is not None and (is_host(skipped.device) or not all(group["fused"] for group in self.param_groups)):
            # Only the fused kernel reads the flag on the device.
            if skipped:
                return loss
            skipped = None
        for group, parts in self._batches():
            if self.offloaded == "none":
                self._update(group, parts, skipped)
            else:
                self._update_on_device(group, parts, skipped)
        if self.offloaded == "parameters":
            # A forward reads the parameters without a word to the optimizer.
            self.synchronize()
        return loss

    def prepare_step(self) -> Tensor | None:
        self.check_norm(skips=self.expert.skips_step)
        norm = None if self._next_norm is None else self._next_norm.broken
        broken = self.gradient_faults.check(norm, scaled=getattr(self, "found_inf", None) is not None)
        # Otherwise only this rank changes nothing, and the next step raises.
        self._broken = None if self.expert.skips_step else broken
        return broken if self.expert.skips_step else None

    @cached_property
    def gradient_faults(self) -> GradientFaults:
        return GradientFaults(self)

    def rebuild(self) -> None:
        """Expect gradients of the parameters that are not frozen now."""
        self.gradient_faults.expect_gradients()

    def names(self) -> list[str]:
        return [name for name, _ in named_parameters(self.param_groups)]

    def on_faults(self, faults: Sequence[Fault]) -> None:
        check_faults(self.names(), faults, ALLOWED[self.expert.on_bad_gradient])
        if self.expert.skips_step:
            warn_of_skipped(self.names(), faults)

    def _update_on_device(
        self, group: Mapping[str, Any], parts: Sequence[AdamElements], skipped: Tensor | None
    ) -> None:
        """Update parts whose tensors are on the host: they come whole, and go back at once."""
        names, device = MOVED[self.offloaded], step_device(next(p for p in group["params"] if p.grad is not None))
        moved = [
            part._replace(**{name: getattr(part, name).to(device, non_blocking=True) for name in names})
            for part in parts
        ]
        self._update(group, moved, skipped)
        changed = [name for name in names if name != "grad"]
        for (old, new), name in product(zip(parts, moved, strict=True), changed):
            getattr(old, name).copy_(getattr(new, name), non_blocking=True)

    def _batches(self) -> Iterator[tuple[Mapping[str, Any], list[AdamElements]]]:
        """A group, and parts to update together: with BATCH_BYTES of averages to convert, or whole parameters."""
        converts = self.state_dtype == "bfloat16"
        limit = BATCH_BYTES if converts else math.inf
        for group in self.param_groups:
            parts = (part for whole in self._elements(group) for part in (_cut(whole) if converts else (whole,)))
            batches = batched_by_kind(
                parts, lambda part: part.param.dtype, limit, lambda part: part.param.numel() * part.element_bytes
            )
            yield from ((group, batch) for batch in batches)

    def _elements(self, group: Mapping[str, Any]) -> Iterator[AdamElements]:
        for fqn, parameter in named_parameters([group]):
            if (grad := parameter.grad) is None:
                continue
            if placement_key(grad) != placement_key(parameter):
                raise ValueError(REMEDIES[Fault.GRADIENT_ELSEWHERE].format(names=fqn))
            state: dict[str, Any] = self.state[parameter]
            # Another library may keep tensors of its own here before the first step.
            if AVERAGES[0] not in state:
                state.update(self._new_state(parameter, group))
            average, square = (local(state[name]) for name in AVERAGES)
            yield AdamElements(local(parameter), local(grad), average, square, state["step"])

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        # As in torch: the fused kernel needs the step count on the device.
        device = step_device(parameter) if group["fused"] else torch.device("cpu")
        dtype = torch.bfloat16 if self.state_dtype == "bfloat16" else parameter.dtype
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step, **{name: new_state(parameter, dtype, self.offloaded) for name in AVERAGES}}

    def _update(self, group: Mapping[str, Any], parts: Sequence[AdamElements], skipped: Tensor | None) -> None:
        params, grads, averages, squares, steps = map(list, zip(*parts, strict=True))
        states = [*averages, *squares]
        wide = [state.to(params[0].dtype) for state in states]
        adam(
            params,
            grads,
            wide[: len(parts)],
            wide[len(parts) :],
            [],
            steps,
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=None if skipped is None else skipped.float(),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if wide[0] is not states[0]:
            torch._foreach_copy_(states, wide)

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, but averages keep this optimizer's dtype and device.

        Raises ValueError, before anything is loaded, for other groups, and for states of another optimizer or layout.
        """
        with after_pre_hooks(self, state_dict) as loaded:
            self.synchronize()
            states = self.checked_states(loaded)
            # torch.optim.AdamW would move all averages to the device at once.
            super().load_state_dict({**loaded, "state": {}})
            for parameter, current, saved in states:
                for name, value in current.items():
                    local(value).copy_(local(saved[name]))
                self.state[parameter] = current

    def checked_states(self, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]]:
        """(parameter, state to fill, loaded state) of every saved state. Changes nothing.

        Raises ValueError as `load_state_dict`.
        """
        saved_groups = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state dict has groups of {sizes[1]} parameters, and this AdamW of {sizes[0]}; give both the same "
                "parameters and groups"
            )
        states = []
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            if other := sorted({"betas", "eps", "lr", "weight_decay"} - saved_group.keys()):
                raise ValueError(f"the state dict is of another optimizer: its groups have no {', '.join(other)}")
            for fqn, parameter, key in zip(names_in(group), group["params"], saved_group["params"], strict=True):
                if key in state_dict["state"]:
                    current = dict(self.state.get(parameter, {}))
                    if AVERAGES[0] not in current:
                        current = self._new_state(parameter, group)
                    states.append(
                        (parameter, current, checked_state(fqn, current, state_dict["state"][key], parameter))
                    )
        return states

    def offload(self) -> None:
        """Move the averages to pinned host memory."""
        self._move("state")

    def reload(self) -> None:
        self._move("none")

    def _move(self, to: Offload) -> None:
        if not needs_move(self.offloaded, to):
            return
        self.synchronize()
        self.offloaded = to
        for parameter, state in self.state.items():
            for name in [name for name in AVERAGES if name in state]:
                state[name] = moved_state(state[name], parameter, to)

    def synchronize(self) -> None:
        """Wait until states on the host have arrived."""
        if self.offloaded != "none":
            for kind in dict.fromkeys(step_device(parameter).type for parameter in self.gradient_faults.params):
                torch.get_device_module(kind).synchronize()


def _cut(whole: AdamElements) -> Iterator[AdamElements]:
    """Parts with at most BATCH_BYTES of averages each."""
    numel = whole.param.numel()
    size = max(VECTOR, BATCH_BYTES // whole.element_bytes // VECTOR * VECTOR)
    if size >= numel:
        yield whole
        return
    # view() never copies: an update of a copy would be lost.
    param, average, square = (tensor.view(-1) for tensor in (whole.param, whole.exp_avg, whole.exp_avg_sq))
    grad = whole.grad.reshape(-1)
    for start in range(0, numel, size):
        part = slice(start, start + size)
        # Only the last part advances the counter; other parts advance a copy.
        step = whole.step if part.stop >= numel else whole.step.clone()
        yield AdamElements(param[part], grad[part], average[part], square[part], step)
