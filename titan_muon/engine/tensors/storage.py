"""Parameter groups, trained parameters and their local storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from ...options import HYPERPARAMETERS, MuonOptions, check
from ..layout.intervals import Geometry
from ..layout.types import Parameter
from ..orthogonalize import Iteration, iteration
from .dtensor import held_indices, layout_of, local, own_rows, step_device
from .names import named_parameters

STEP = "step"
"""Key of a group: the number of steps, for stochastic rounding and for the warm-up of the momentum."""


def iteration_of(group: Mapping[str, Any]) -> Iteration:
    """The iteration of a group. Raises ValueError for invalid coefficients."""
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def iteration_changed(group: Mapping[str, Any], planned: Iteration) -> bool:
    """Whether a group's iteration differs from the planned iteration."""
    try:
        return iteration_of(group) != planned
    except ValueError:
        return True


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has no names, or a hyperparameter is out of range."""
    if "param_names" not in group:
        raise ValueError(
            "Muon needs the names of its parameters: pass (name, parameter) pairs of matrices, pass "
            "titan_muon.parameter_groups(model)['muon'], or give the model to titan_muon.Hybrid"
        )
    check_lr(group["lr"])
    check(MuonOptions, {name: group[name] for name in HYPERPARAMETERS})
    iteration_of(group)


def check_lr(lr: object) -> None:
    """Raise ValueError for a learning rate in a tensor of several elements."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: Tensor lr must be 1-element, and this one has shape {tuple(lr.shape)}")


def coefficient_rows(ns_coefficients: Any) -> Any:
    """Coefficients with a single (a, b, c), as in torch.optim.Muon, as a row."""
    flat = isinstance(ns_coefficients, Sequence) and not isinstance(ns_coefficients, str)
    if flat and len(ns_coefficients) == 3 and all(isinstance(number, int | float) for number in ns_coefficients):
        return [list(ns_coefficients)]
    return ns_coefficients


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that Muon trains.

    Attributes:
        momentum_buffer: placed like the parameter or like one replica; None before planning.
        group: parameter group. A scheduler may change hyperparameters between steps.
        key, stored: `placement_key`, and dtype and device of the local tensor, when the step was planned.
        on_mesh: whether this rank is on the mesh, with a range of rows that is not empty, and so gets a gradient.
        state: of the optimizer, with the states of features too.
    """

    fqn: str
    param: Tensor
    momentum_buffer: Tensor | None
    group: Mapping[str, Any]
    key: object
    on_mesh: bool
    stored: tuple[torch.dtype, torch.device]
    state: dict[str, Any]
    momentum_device: str = ""

    @property
    def momentum(self) -> Tensor:
        assert self.momentum_buffer is not None, f"{self.fqn}: a step before the momentum was made"
        return self.momentum_buffer


def with_momentum(trained: TrainedParam, momentum: Tensor) -> TrainedParam:
    """The parameter with this momentum."""
    return replace(trained, momentum_buffer=momentum, momentum_device=local(momentum).device.type)


def trained_params(
    groups: Iterable[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    rank: int,
    options: MuonOptions,
    *,
    counts_steps: bool = False,
) -> Iterator[TrainedParam]:
    """The trained parameters of an optimizer's groups, with the momentum from `state`, if any.

    Adds STEP to groups if the options or the algorithm (`counts_steps`) count steps. Raises ValueError for a parameter
    repeated or without storage.
    """
    seen: set[str] = set()
    names: dict[Tensor, str] = {}
    for group in groups:
        for fqn, parameter in named_parameters([group]):
            if fqn in seen:
                raise ValueError(f"{fqn}: given to Muon twice; give every parameter once")
            if parameter in names:
                raise ValueError(f"{fqn}: is the same tensor as {names[parameter]}; give every parameter once")
            seen.add(fqn)
            names[parameter] = fqn
            if not parameter.requires_grad:
                continue
            if parameter.is_meta:
                raise ValueError(f"{fqn}: on the meta device; give it storage (to_empty) before building Muon")
            rounds = options.rounding == "stochastic" and parameter.dtype == torch.bfloat16
            if rounds or counts_steps or options.counts_steps:
                # Only where steps count, so that other checkpoints keep their keys.
                group.setdefault(STEP, 0)
            on_mesh, shard = rank in layout_of(fqn, parameter).mesh.ranks, local(parameter)
            # Megatron-FSDP gives an empty range of rows no gradient.
            on_mesh = on_mesh and (shard.numel() > 0 or own_rows(parameter) is None)
            placed, states = (placement_key(parameter), on_mesh, (shard.dtype, shard.device)), state[parameter]
            trained = TrainedParam(fqn, parameter, None, group, *placed, states)
            momentum = states.get("momentum_buffer")
            yield trained if momentum is None else with_momentum(trained, momentum)


@dataclass(frozen=True)
class Storage:
    """(rows, cols) views of a parameter and its momentum, and the tensors behind the views.

    The momentum has all rows of the parameter, or a range from `first_row` on, or none.
    """

    param: Tensor
    momentum: Tensor
    local: Tensor
    param_storage: UntypedStorage
    momentum_storage: UntypedStorage
    first_row: int = 0

    def is_of(self, trained: TrainedParam) -> bool:
        same = local(trained.momentum).untyped_storage() is self.momentum_storage
        return same and self.is_of_weights(trained)

    def is_of_weights(self, trained: TrainedParam) -> bool:
        stored = local(trained.param)
        # `param.data = ...` replaces a storage. PyTorch keeps one Python object for each live storage.
        return stored is self.local and stored.untyped_storage() is self.param_storage


def storage_of(trained: TrainedParam, planned: Parameter) -> Storage:
    """The views of a parameter's storage."""
    stored, momentum, split = local(trained.param), local(trained.momentum), planned.stack.row_dims
    size = rows, cols = prod(stored.shape[:split]), prod(stored.shape[split:])
    first = 0
    if momentum.numel() < stored.numel():
        rows, height = momentum.numel() // cols, prod(stored.shape[1:split])
        first = height * int(held_indices(trained.momentum)[0][0]) if rows else 0
    # Not reshape(), because an update of a copy would be lost.
    views = stored.detach().view(size), momentum.view(rows, cols)
    return Storage(*views, stored, stored.untyped_storage(), momentum.untyped_storage(), first)


def placement_key(tensor: Tensor) -> object:
    """Mesh, placements and local shape. Equal keys mean equal sharding."""
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return placed, tuple(local(tensor).shape)


def storage_fault(fqn: str, parameter: Tensor, geometry: Geometry, rank: int) -> str | None:
    """The mismatch between this rank's storage and the parameter's layout, or None."""
    if rank not in geometry.replica:
        return None
    stored, shape = local(parameter), geometry.local_shape(rank)
    # DTensor's placements are wrong for some uneven shards (FSDP2 over TP).
    if tuple(stored.shape) != shape:
        return f"{fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}"
    if not stored.is_contiguous():
        return f"{fqn}: its storage is not contiguous; call contiguous() before building Muon"
    return None


def check_devices(params: Sequence[TrainedParam]) -> None:
    """Raise ValueError for parameters on several devices, or on a device without streams."""
    first = params[0]
    if problem := missing_streams(device_of(params).type):
        raise ValueError(f"{first.fqn}: {problem}")
    for trained in params:
        if step_device(trained.param) != step_device(first.param):
            raise ValueError(
                f"{trained.fqn}: is on {step_device(trained.param)}, and {first.fqn} on {step_device(first.param)}; "
                "move all parameters of a Muon to one device, or build a Muon for each device"
            )


def missing_streams(kind: str) -> str:
    """The problem of a device type without streams, and a remedy; empty for other types."""
    # PyTorch has no module for `meta`, where nothing runs.
    if hasattr(getattr(torch, kind, torch), "Stream"):
        return ""
    return (
        f"PyTorch {torch.__version__} has no streams on {kind}, and a step needs them; install PyTorch 2.15 or newer, "
        "or move the model to the CPU"
    )


def device_of(params: Sequence[TrainedParam]) -> torch.device:
    """The device for orthogonalization."""
    return step_device(params[0].param) if params else torch.device("cpu")
