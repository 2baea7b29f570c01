"""The input of a step: gradients, and the faults of parameters before the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..faults.faults import Fault, fault_of, norm_dtype
from ..faults.skip import Scaling
from ..state.groups import iteration_changed
from ..tensors.names import names_in
from ..tensors.storage import Storage, TrainedParam
from .context import StepContext

ITERATION_KEYS = ("ns_coefficients", "ns_steps", "eps", "algorithm")
"""The keys of a group that a plan fixes."""


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step, by parameter.

    Attributes:
        grads: (rows, cols) local gradient; None if missing or released, or the parameter is excluded.
        excluded: parameters without an update or decay. Other parameters decay even without a gradient.
        uniform: whether all gradients exist, in one dtype.
        params: the parameters, whose gradients `release` frees.
        scaling: the flag for kernels to read, if they may skip the step.
        inverse: () float32 factor on the gradients, unless kernels take it from `scaling`.
    """

    grads: list[Tensor | None]
    excluded: frozenset[int]
    uniform: bool
    params: Sequence[TrainedParam]
    scaling: Scaling | None = None
    inverse: Tensor | None = None

    def dtype(self, parameter: int) -> torch.dtype | None:
        grad = self.grads[parameter]
        return None if grad is None else grad.dtype

    def nonfinite(self, device: torch.device) -> tuple[list[int], Tensor]:
        """Parameters with elements on this rank, and (count,) bool on `device`: whether the gradient is not finite."""
        present = [(i, grad) for i, grad in enumerate(self.grads) if grad is not None and grad.numel() > 0]
        if not present:
            return [], torch.zeros(0, dtype=torch.bool, device=device)
        grads = [grad for _, grad in present]
        # Newton-Schulz cannot normalize by a norm that overflows.
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=norm_dtype(grads))).float()
        return [i for i, _ in present], norms.isfinite().logical_not_().to(device, non_blocking=True)

    def release(self, parameters: Iterable[int]) -> None:
        """Free these gradients."""
        for index in parameters:
            if self.grads[index] is not None:
                self.grads[index] = None
                self.params[index].param.grad = None


def check_first_gradients(params: Sequence[TrainedParam]) -> None:
    """Raise ValueError if no parameter on this rank has a gradient in the first step."""
    trained = [param for param in params if param.on_mesh]
    if trained and all(param.param.grad is None for param in trained):
        raise ValueError(
            f"no gradient for {trained[0].fqn} or any other parameter of Muon in the first step: either backward did "
            "not run, or other tensors replaced these parameters in the model after Muon was made. Make Muon from the "
            "parameters of the sharded model, after fully_shard, own and the like"
        )


def checked_inputs(
    rank: StepContext,
    iterations: Sequence[tuple[Any, ...]],
    names: Set[str],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> tuple[list[Fault], list[Tensor | None], bool]:
    """The fault and (rows, cols) gradient of each parameter before a step, and whether any storage has moved.

    `iterations`: by parameter, the values of `ITERATION_KEYS` when the step was planned. `names`: of these parameters.
    """
    current, moved = dict[str, Tensor](), False
    for group in groups:
        if len(group["param_names"]) != len(group["params"]):
            names_in(group)
        current.update(zip(group["param_names"], group["params"], strict=True))
    faults, grads = [Fault.NONE] * len(rank.params), list[Tensor | None]()
    of_group: Mapping[str, Any] | None = None
    as_planned = True
    for index, (trained, storage) in enumerate(zip(rank.params, rank.storage, strict=True)):
        if trained.group is not of_group:
            of_group = group = trained.group
            as_planned = tuple(map(group.get, ITERATION_KEYS)) == iterations[index]
        momentum = state.get(trained.param, {}).get("momentum_buffer")
        if not (as_planned and _is_unchanged(trained, storage, current.get(trained.fqn), momentum)):
            in_place = storage.is_of(trained)
            faults[index] = fault_of(trained, current.get(trained.fqn), momentum, in_place=in_place)
            moved = moved or not in_place or momentum is not trained.momentum_buffer
            changed = trained.group.get("algorithm") != iterations[index][-1]
            if changed or iteration_changed(trained.group, rank.iterations[index]):
                faults[index] = Fault.NEWTON_SCHULZ_CHANGED
        grad = trained.param.grad
        if grad is not None and (not trained.on_mesh or faults[index] is not Fault.NONE):
            grad = None
        elif isinstance(grad, DTensor):
            grad = grad._local_tensor
        if grad is not None and grad.ndim != 2:
            grad = grad.reshape(storage.param.shape)
        grads.append(grad)
    if faults and any(current[name].requires_grad for name in current.keys() - names):
        # A thawed parameter has no place in the report.
        faults[0] = Fault.THAWED
    return faults, grads, moved


def _is_unchanged(trained: TrainedParam, storage: Storage, param: Tensor | None, momentum: Tensor | None) -> bool:
    """Whether parameter and momentum are as planned, and the gradient is placed like the parameter.

    A fast test of the common case. `fault_of` finds what has changed.
    """
    if momentum is None or momentum is not trained.momentum_buffer or param is not trained.param:
        return False
    grad = param.grad
    if grad is None or not trained.on_mesh or grad.layout != torch.strided:
        return False
    placement: object = None
    if isinstance(grad, DTensor):
        placement, grad = (grad.device_mesh, grad.placements), grad._local_tensor
    elif isinstance(param, DTensor):
        placement = param.device_mesh, param.placements
    if (placement, tuple(grad.shape)) != trained.key:
        return False
    stored = param._local_tensor if isinstance(param, DTensor) else param
    kept = momentum._local_tensor if isinstance(momentum, DTensor) else momentum
    in_place = stored is storage.local and stored.untyped_storage() is storage.param_storage
    return in_place and kept.untyped_storage() is storage.momentum_storage
