"""The input of a step: gradients, and the faults of parameters before the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..faults.faults import Fault, fault_of, norm_dtype
from ..faults.skip import Scaling
from ..tensors.dtensor import local
from ..tensors.names import names_in
from ..tensors.storage import Storage, TrainedParam, iteration_changed
from .algorithm import Group
from .foreach import StepContext

ITERATION_KEYS = ("ns_coefficients", "ns_steps", "eps", "algorithm")
"""The keys of a group that a plan fixes."""

States = Mapping[Tensor, Mapping[str, Any]]


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

    def release(self, parameters: Iterable[int]) -> None:
        """Free these gradients."""
        for index in parameters:
            if self.grads[index] is not None:
                self.grads[index] = None
                self.params[index].param.grad = None


def nonfinite(grads: Iterable[Tensor | None], order: float, device: torch.device) -> tuple[list[int], Tensor]:
    """Places of local gradients with elements, and (count,) bool on `device`: whether the norm is not finite."""
    present = {place: grad for place, grad in enumerate(grads) if grad is not None and grad.numel() > 0}
    if not present:
        return [], torch.zeros(0, dtype=torch.bool, device=device)
    held = list(present.values())
    norms = torch.stack(torch._foreach_norm(held, order, dtype=norm_dtype(held))).float()
    return list(present), norms.isfinite().logical_not_().to(device, non_blocking=True)


def check_first_gradients(params: Sequence[TrainedParam]) -> None:
    """Raise ValueError if no parameter on this rank has a gradient in the first step."""
    trained = [param for param in params if param.on_mesh]
    if trained and all(param.param.grad is None for param in trained):
        raise ValueError(
            f"no gradient for {trained[0].fqn} or any other parameter of Muon in the first step: either backward did "
            "not run, or other tensors replaced these parameters in the model after Muon was made. Make Muon from the "
            "parameters of the sharded model, after fully_shard, own and the like"
        )


SeenInputs = tuple[list[object], list[object]]
"""The input of a step without its numbers: what is compared by identity, and what by value."""


def checked_inputs(
    rank: StepContext,
    iterations: Sequence[tuple[Any, ...]],
    groups: Sequence[Group],
    state: States,
    faultless: SeenInputs | None,
) -> tuple[list[Fault], list[Tensor | None], bool, SeenInputs | None]:
    """The fault and (rows, cols) gradient of each parameter before a step, and whether any storage has moved.

    Also the input, for the next step, unless there is a fault. `iterations`: by parameter, the values of
    `ITERATION_KEYS` when the step was planned. `faultless`: of the step before.
    """
    given: list[Any] = [trained.param.grad if trained.on_mesh else None for trained in rank.params]
    grads = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in given]
    seen = objects, values = _seen(rank, given, grads, groups, state)
    if faultless is None or values != faultless[1] or not all(map(is_, objects, faultless[0])):
        faults, grads, moved = _compared(rank, iterations, groups, state)
        return faults, grads, moved, None if moved or any(faults) else seen
    pairs = zip(grads, rank.storage, strict=True)
    flat = [grad if grad is None or grad.ndim == 2 else _flat(grad, storage) for grad, storage in pairs]
    return [Fault.NONE] * len(flat), flat, False, seen


def _seen(
    rank: StepContext, given: Sequence[Any], grads: Sequence[Tensor | None], groups: Sequence[Group], state: States
) -> SeenInputs:
    """`given`, `grads`: gradients, and the local ones."""
    params = [param for group in groups for param in group["params"]]
    momenta = [kept.get("momentum_buffer") for kept in state.values()]
    tensors = [*(trained.param for trained in rank.params), *momenta]
    stored = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    present = [grad for grad in grads if grad is not None]
    # Lists compare by identity first, and FSDP gives each gradient of a parameter the same placements.
    values: list[object] = [len(params), len(momenta), *(grad.shape for grad in present)]
    values += [grad.layout for grad in present]
    values += [grad.device_mesh if isinstance(grad, DTensor) else None for grad in given]
    values += [grad.placements if isinstance(grad, DTensor) else None for grad in given]
    values += [param.requires_grad for param in params]
    # As text, because lists of coefficients may change in place.
    values += [f"{group['param_names']} {[*map(group.get, ITERATION_KEYS)]}" for group in groups]
    storages = [None if tensor is None else tensor.untyped_storage() for tensor in stored]
    return [*params, *state, *momenta, *stored, *storages], values


def _flat(grad: Tensor, storage: Storage) -> Tensor:
    return grad if grad.ndim == 2 else grad.reshape(storage.param.shape)


def _compared(
    rank: StepContext, iterations: Sequence[tuple[Any, ...]], groups: Sequence[Group], state: States
) -> tuple[list[Fault], list[Tensor | None], bool]:
    """As `checked_inputs`, parameter by parameter."""
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
        momentum, in_place = state.get(trained.param, {}).get("momentum_buffer"), storage.is_of(trained)
        faults[index] = fault_of(trained, current.get(trained.fqn), momentum, in_place=in_place)
        moved = moved or not in_place or momentum is not trained.momentum_buffer
        changed = trained.group.get("algorithm") != iterations[index][-1]
        if not as_planned and (changed or iteration_changed(trained.group, rank.iterations[index])):
            faults[index] = Fault.NEWTON_SCHULZ_CHANGED
        grad = trained.param.grad
        is_read = trained.on_mesh and faults[index] is Fault.NONE
        grads.append(_flat(local(grad), storage) if is_read and grad is not None else None)
    if faults and any(
        current[name].requires_grad for name in current.keys() - {trained.fqn for trained in rank.params}
    ):
        # A thawed parameter has no place in the report.
        faults[0] = Fault.THAWED
    return faults, grads, moved
