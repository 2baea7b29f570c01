"""torch.optim's AdamW and Adam, batch by batch: their states may be on the host between steps, and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .dtensor import local, storage_device
from .offload import Window, moved_state, new_state
from .options import SLOWEST_IN_BFLOAT16, Offload, OptionError, StateDtype
from .params import placement_key

BATCH_BYTES = 2**26
"""Most bytes of states that are on the device together, or have copies in the parameters' dtype, at one time."""

VECTOR = 64
"""Parts are cut at multiples of so many elements: the CPU's kernels compute the rest of a vector to other bits."""

AVERAGES = ("exp_avg", "exp_avg_sq")
"""States of a parameter's shape, by torch's names: the averages of gradients and of their squares."""


@dataclass(frozen=True)
class Part:
    """Elements of a parameter on this rank, their gradient, their two averages, and the count of its steps."""

    param: Tensor
    grad: Tensor
    average: Tensor
    square_average: Tensor
    step: Tensor

    @property
    def state_bytes(self) -> int:
        """Bytes of both averages."""
        return self.average.nbytes + self.square_average.nbytes


@dataclass(frozen=True)
class Batch:
    """Parts that are updated together: of one group, and of one dtype."""

    group: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def states(self) -> list[Tensor]:
        """Their averages, those of the gradients first."""
        return [part.average for part in self.parts] + [part.square_average for part in self.parts]


class _InBatches(torch.optim.Adam):
    """Adam's step, in parts of bounded size; elements are updated one by one, so parts have the same bits as a whole.

    Args:
        state_dtype: dtype of the averages: their parameter's, or bfloat16. The arithmetic is in the parameter's dtype.
        offload: where the averages are between steps; `state`: in pinned memory of the host.

    The other keywords are torch's. Raises OptionError for a beta that bfloat16 is too coarse for.
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
        """Add a group, as torch's does, unless it asks for what is not done in batches."""
        group = {**self.defaults, **param_group}
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[name]:
                raise OptionError(name, "= True is not accepted; take torch.optim's own optimizer for it")
        if self._state_dtype == "bfloat16" and max(group["betas"]) > SLOWEST_IN_BFLOAT16:
            problem = f"each at most {SLOWEST_IN_BFLOAT16}, because bfloat16 would round the averages' steps away"
            raise OptionError("betas", f"= {list(group['betas'])} are not accepted with state_dtype: {problem}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient. Returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = tuple(self._batches())
        window = self._window_of(batches)
        if window is not None:
            window.begin([batch.states for batch in batches])
        for batch in batches:
            states = batch.states if window is None else window.take()
            self._update(batch, states)
            if window is not None:
                window.give_back()
        if window is not None:
            window.end()
        return loss

    def _window_of(self, batches: tuple[Batch, ...]) -> Window | None:
        if self._offload == "none" or not batches:
            return None
        if self._window is None:
            self._window = Window(batches[0].parts[0].param.device)
        return self._window

    def _batches(self) -> Iterator[Batch]:
        bounded = self._offload == "state" or self._state_dtype == "bfloat16"
        for group in self.param_groups:
            waiting: dict[torch.dtype, list[Part]] = {}
            sizes: dict[torch.dtype, int] = {}
            for part in self._parts(group, BATCH_BYTES if bounded else None):
                kind, size = part.param.dtype, part.state_bytes
                if bounded and kind in waiting and sizes[kind] + size > BATCH_BYTES:
                    yield Batch(group, tuple(waiting.pop(kind)))
                sizes[kind] = size + (sizes[kind] if kind in waiting else 0)
                waiting.setdefault(kind, []).append(part)
            yield from (Batch(group, tuple(parts)) for parts in waiting.values())

    def _parts(self, group: Mapping[str, Any], most: int | None) -> Iterator[Part]:
        """The parts of a group's parameters, of at most `most` bytes of states each."""
        names = group.get("param_names", [f"parameter {index}" for index in range(len(group["params"]))])
        for fqn, parameter in zip(names, group["params"], strict=True):
            if parameter.grad is None:
                continue
            state = self._state_of(parameter, group)
            average, square = (local(state[name]) for name in AVERAGES)
            whole = Part(local(parameter), _grad_of(fqn, parameter), average, square, state["step"])
            yield from [whole] if most is None else _cut(whole, most)

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            # torch's own places of it: a fused kernel counts on its device.
            device = storage_device(parameter) if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in AVERAGES:
                state[name] = self._new_average(parameter)
        return state

    def _new_average(self, parameter: Tensor) -> Tensor:
        dtype = torch.bfloat16 if self._state_dtype == "bfloat16" else parameter.dtype
        return new_state(parameter, dtype, on_host=self._offload == "state")

    def _update(self, batch: Batch, states: list[Tensor]) -> None:
        group, parts = batch.group, batch.parts
        # The arithmetic is the parameters', whatever the averages are stored in.
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
        """As torch's; averages that are offloaded are there as tensors of the host."""
        self._synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's does, with the averages in this optimizer's dtype and place."""
        self._synchronize()
        current = {parameter: dict(state) for parameter, state in self.state.items()}
        # torch's would bring all averages to the device at once, in the parameter's dtype.
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
            # In place, since there may not be room for all of it twice.
            local(value).copy_(local(torch.as_tensor(saved[name])))

    def offload(self) -> None:
        """Keep the averages on the host from now on: pinned, and brought to the device batch by batch in a step."""
        self._move("state")

    def reload(self) -> None:
        """Keep the averages on the device from now on."""
        self._move("none")

    def _move(self, to: Offload) -> None:
        if self._offload == to:
            return
        self._synchronize()
        self._offload = to
        for parameter, state in self.state.items():
            for name in AVERAGES:
                state[name] = moved_state(state[name], parameter, on_host=to == "state")

    def _synchronize(self) -> None:
        """Have the host wait for the averages that are on their way to it."""
        if self._window is not None:
            self._window.synchronize()


def _cut(whole: Part, most: int) -> Iterator[Part]:
    """A parameter in parts of at most `most` bytes of states."""
    numel = whole.param.numel()
    size = max(VECTOR, most // (whole.average.element_size() + whole.square_average.element_size()) // VECTOR * VECTOR)
    if size >= numel:
        yield whole
        return
    # view() for what is updated, since an update of a copy would be lost; the gradient is only read.
    param, average, square = (tensor.view(-1) for tensor in (whole.param, whole.average, whole.square_average))
    grad = whole.grad.reshape(-1)
    for start in range(0, numel, size):
        part = slice(start, start + size)
        # A step counts once: all parts but the last count in a copy.
        step = whole.step if part.stop >= numel else whole.step.clone()
        yield Part(param[part], grad[part], average[part], square[part], step)


def _grad_of(fqn: str, parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None, f"{fqn}: without a gradient, it has no part"
    if placement_key(grad) != placement_key(parameter):
        raise ValueError(f"{fqn}: the gradient's mesh or placements differ from the parameter's; redistribute it")
    return local(grad)


class AdamW(_InBatches, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), as torch.optim.AdamW bit for bit unless `state_dtype` is set."""

    __doc__ = f"{__doc__}\n\n{_InBatches.__doc__}"


class Adam(_InBatches):
    """Adam (Kingma and Ba, arXiv:1412.6980), as torch.optim.Adam bit for bit unless `state_dtype` is set."""

    __doc__ = f"{__doc__}\n\n{_InBatches.__doc__}"
