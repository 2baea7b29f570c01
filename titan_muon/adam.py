"""torch.optim's AdamW in batches, optionally with states on the host and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .options import SLOWEST_IN_BFLOAT16, Offload, OptionError, StateDtype
from .state.host import Transfer, Window, moved_state, moves, new_state, resolved
from .tensors.dtensor import local, step_device
from .tensors.storage import placement_key

BATCH_BYTES = 2**26
"""Limit on the bytes of a transfer, or of states converted to the parameters' dtype."""

VECTOR = 64
"""Alignment of parts in elements, because CPU kernels give different bits for incomplete vectors."""

AVERAGES = ("exp_avg", "exp_avg_sq")
"""torch's names of the averages of gradients and of squared gradients."""

CHANGED: Mapping[Offload, tuple[str, ...]] = {
    "none": (),
    "state": ("average", "square_average"),
    "parameters": ("average", "square_average", "param"),
}
"""Fields of Elements that a step moves to the device and back."""

READ: Mapping[Offload, tuple[str, ...]] = {"none": (), "state": (), "parameters": ("grad",)}
"""Fields of Elements that a step only moves to the device."""


@dataclass(frozen=True)
class Elements:
    """Elements of a parameter on this rank."""

    param: Tensor
    grad: Tensor
    average: Tensor
    square_average: Tensor
    step: Tensor

    def element_bytes(self, names: Iterable[str]) -> int:
        return sum(getattr(self, name).element_size() for name in names)


@dataclass(frozen=True)
class ElementBatch:
    """Parts with one group and one dtype, updated together."""

    group: Mapping[str, Any]
    parts: tuple[Elements, ...]

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """The named tensors of all parts, by name."""
        return [getattr(part, name) for name in names for part in self.parts]

    def with_tensors(self, names: Sequence[str], tensors: Sequence[Tensor]) -> ElementBatch:
        """The batch with replaced tensors, in the order of `self.tensors(names)`."""
        count = len(self.parts)
        parts = (replace(part, **dict(zip(names, tensors[i::count], strict=True))) for i, part in enumerate(self.parts))
        return replace(self, parts=tuple(parts))


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), with the bits of torch.optim.AdamW unless `state_dtype` is set.

    Further keywords are torch's. With `state_dtype` or `offload`, a step updates parts of bounded size.

    Args:
        state_dtype: dtype of the averages. The arithmetic is in the parameter's dtype.
        offload: tensors in pinned host memory: the averages (`state`), or also parameters and gradients (`parameters`).
            FSDP's CPUOffloadPolicy implies `parameters`.

    Raises:
        OptionError: for an unsupported keyword, or a beta above SLOWEST_IN_BFLOAT16 with bfloat16 averages.
    """

    _state_dtype: StateDtype = "parameter"
    _offload: Offload = "none"
    _window: Window | None = None

    def __init__(
        self, params: Any, *, state_dtype: StateDtype = "parameter", offload: Offload = "none", **options: Any
    ) -> None:
        self._state_dtype, self._offload = state_dtype, offload
        super().__init__(params, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim.AdamW. Raises OptionError for options without support."""
        group = {**self.defaults, **param_group}
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[name]:
                raise OptionError(name, "= True is not accepted; use torch.optim.AdamW for this option")
        if self._state_dtype == "bfloat16" and max(group["betas"]) > SLOWEST_IN_BFLOAT16:
            problem = f"each at most {SLOWEST_IN_BFLOAT16}, because bfloat16 would round changes of the averages away"
            raise OptionError("betas", f"= {list(group['betas'])} are not accepted with state_dtype: {problem}")
        super().add_param_group(param_group)
        self._offload = resolved(self._offload, self.param_groups[-1]["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with a gradient. Returns the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = tuple(self._batches())
        if self._offload == "none":
            for batch in batches:
                self._update(batch)
        elif batches:
            self._update_in_window(batches)
        return loss

    def _update_in_window(self, batches: Sequence[ElementBatch]) -> None:
        changed, read = CHANGED[self._offload], READ[self._offload]
        if self._window is None:
            first = next(p for group in self.param_groups for p in group["params"] if p.grad is not None)
            self._window = Window(step_device(first))
        self._window.begin([Transfer(batch.tensors(changed), batch.tensors(read)) for batch in batches])
        for batch in batches:
            self._update(batch.with_tensors((*changed, *read), self._window.take()))
            self._window.give_back()
        self._window.end()
        # The user may read parameters on the host after the step.
        if "param" in changed:
            self._window.synchronize()

    def _batches(self) -> Iterator[ElementBatch]:
        bounded = self._offload != "none" or self._state_dtype == "bfloat16"
        moved = (*CHANGED[self._offload], *READ[self._offload]) if self._offload != "none" else CHANGED["state"]
        for group in self.param_groups:
            waiting: dict[torch.dtype, list[Elements]] = {}
            sizes: dict[torch.dtype, int] = {}
            for part in self._parts(group, moved if bounded else ()):
                kind, size = part.param.dtype, part.param.numel() * part.element_bytes(moved)
                if bounded and kind in waiting and sizes[kind] + size > BATCH_BYTES:
                    yield ElementBatch(group, tuple(waiting.pop(kind)))
                sizes[kind] = size + (sizes[kind] if kind in waiting else 0)
                waiting.setdefault(kind, []).append(part)
            yield from (ElementBatch(group, tuple(parts)) for parts in waiting.values())

    def _parts(self, group: Mapping[str, Any], bounded: Sequence[str]) -> Iterator[Elements]:
        """The parts of a group's parameters, each with at most BATCH_BYTES in the fields `bounded`."""
        names = group.get("param_names", [f"parameter {index}" for index in range(len(group["params"]))])
        for fqn, parameter in zip(names, group["params"], strict=True):
            if parameter.grad is None:
                continue
            state = self._state_of(parameter, group)
            average, square = (local(state[name]) for name in AVERAGES)
            whole = Elements(local(parameter), _grad_of(fqn, parameter), average, square, state["step"])
            yield from _cut(whole, whole.element_bytes(bounded)) if bounded else [whole]

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            # As in torch: the fused kernel needs the step count on the device.
            device = step_device(parameter) if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            dtype = torch.bfloat16 if self._state_dtype == "bfloat16" else parameter.dtype
            for name in AVERAGES:
                state[name] = new_state(parameter, dtype, self._offload)
        return state

    def _update(self, batch: ElementBatch) -> None:
        group, parts, states = batch.group, batch.parts, batch.tensors(CHANGED["state"])
        wide = [state.to(parts[0].param.dtype) for state in states]
        adam(
            [part.param for part in parts],
            [part.grad for part in parts],
            wide[: len(parts)],
            wide[len(parts) :],
            [],
            [part.step for part in parts],
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
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
        """As torch.optim.AdamW. Offloaded averages are host tensors."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.AdamW, but averages keep this optimizer's dtype and device."""
        self.synchronize()
        current = {parameter: dict(state) for parameter, state in self.state.items()}
        # torch.optim.AdamW would move all averages to the device at once.
        super().load_state_dict({**state_dict, "state": {}})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:
                    self.state[parameter] = current.get(parameter, {})
                    self._load(self._state_of(parameter, group), state_dict["state"][key])

    def _load(self, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        missing = [name for name in state if name not in saved]
        if missing:
            raise ValueError(f"the state dict is of another optimizer: its states have no {', '.join(missing)}")
        for name, value in state.items():
            loaded = torch.as_tensor(saved[name])
            # copy_ would broadcast a tensor of another shape, and take another rank's shard for this rank's.
            if placement_key(loaded) != placement_key(value):
                raise ValueError(
                    f"{name} of a parameter with shape {tuple(value.shape)}: the state dict has another shape, mesh or "
                    "placements; load a state of another layout with torch.distributed.checkpoint"
                )
            # In place, to save memory.
            local(value).copy_(local(loaded))

    def offload(self) -> None:
        """Move the averages to pinned host memory, from where steps stream batches."""
        self._move("state")

    def reload(self) -> None:
        """Move the averages to the device."""
        self._move("none")

    def _move(self, to: Offload) -> None:
        if not moves(self._offload, to):
            return
        self.synchronize()
        self._offload = to
        for parameter, state in self.state.items():
            for name in AVERAGES:
                state[name] = moved_state(state[name], parameter, to)

    def synchronize(self) -> None:
        """Block the host until all averages have arrived."""
        if self._window is not None:
            self._window.synchronize()


def _cut(whole: Elements, element_bytes: int) -> Iterator[Elements]:
    """The parts of a parameter, of at most BATCH_BYTES each."""
    numel = whole.param.numel()
    size = max(VECTOR, BATCH_BYTES // element_bytes // VECTOR * VECTOR)
    if size >= numel:
        yield whole
        return
    # view() never copies: an update of a copy would be lost.
    param, average, square = (tensor.view(-1) for tensor in (whole.param, whole.average, whole.square_average))
    grad = whole.grad.reshape(-1)
    for start in range(0, numel, size):
        part = slice(start, start + size)
        # Only the last part advances the counter, the others a copy.
        step = whole.step if part.stop >= numel else whole.step.clone()
        yield Elements(param[part], grad[part], average[part], square[part], step)


def _grad_of(fqn: str, parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None, f"{fqn}: a part without a gradient"
    if placement_key(grad) != placement_key(parameter):
        raise ValueError(
            f"{fqn}: the gradient's mesh or placements differ from the parameter's; redistribute the gradient"
        )
    return local(grad)
