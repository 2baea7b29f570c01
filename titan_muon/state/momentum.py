"""The momentum of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..options import MuonOptions, Offload, OptionError
from ..orthogonalize import DTYPES
from ..plan.terms.layout import chunk
from ..plan.terms.types import Parameter
from ..tensors.dtensor import held_indices, local, storage_device
from ..tensors.mesh import StateMesh, refuse_reads, without_groups
from ..tensors.names import named_parameters
from ..tensors.storage import TrainedParam, placement_key, with_momentum
from .eight_bit import BLOCK, SCALES, new_scales
from .host import new_state, state_like
from .plan_context import PlanContext


def check_not_owned(context: PlanContext) -> None:
    """Raise OptionError for `state="owner"` with owned placement."""
    for fqn, parameter in context.named if context.options.state == "owner" else ():
        if without_groups(parameter):
            problem = f"{fqn} is owned, and its momentum is on its owner alone already"
            raise OptionError("state", f'= "owner": {problem}; set "replicated"')


def with_states(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
) -> tuple[TrainedParam, ...]:
    """The parameters with their momentum, created in the optimizer's `state` if missing."""
    complete = []
    for trained, parameter in zip(params, planned, strict=True):
        if trained.momentum_buffer is None:
            momentum = new_momentum(trained.param, parameter, options)
            state[trained.param]["momentum_buffer"] = momentum
            trained = with_momentum(trained, momentum)
        if options.state_dtype == "int8" and trained.scales is None:
            scales = state[trained.param][SCALES] = new_scales(trained.param)
            trained = replace(trained, scales=scales)
        complete.append(trained)
    return tuple(complete)


def new_momentum(parameter: Tensor, planned: Parameter, options: MuonOptions) -> Tensor:
    """Momentum of zeros: placed like the parameter, or like one replica on the keepers (`planned.state_ranks`)."""
    dtype = torch.int8 if options.state_dtype == "int8" else DTYPES[options.state_dtype]
    if not planned.state_ranks:
        return new_state(parameter, dtype, options.offload)
    cut: list[tuple[int, Any]] = []
    kind = parameter.device.type
    if isinstance(parameter, DTensor):
        kind, axes = parameter.device_mesh.device_type, parameter.device_mesh.mesh.shape
        cut = [(size, p) for size, p in zip(axes, parameter.placements, strict=True) if p != Replicate()]
    ranks = torch.tensor(planned.state_ranks, device="cpu")
    mesh = StateMesh(kind, ranks.view([size for size, _ in cut] or [-1]))
    placements = [placement for _, placement in cut] or [Shard(0)]
    coordinate = mesh.get_coordinate()
    shape = [0] if coordinate is None else list(local(parameter).shape)
    if coordinate is not None and not cut:
        start, stop = chunk(shape[0], len(ranks), coordinate[0])
        shape[0] = stop - start
    stored = state_like(parameter, shape, dtype, options.offload)
    size, stride = parameter.shape, parameter.stride()
    momentum = DTensor.from_local(stored, mesh, placements, run_check=False, shape=size, stride=stride)
    if coordinate is None:
        refuse_reads(momentum, StateMesh.refusal)
    return momentum


def moved(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
) -> list[TrainedParam]:
    """The parameters with copies of the momentum by `options`, also in the optimizer's `state`."""
    moved_params = []
    for trained, parameter in zip(params, planned, strict=True):
        momentum = new_momentum(trained.param, parameter, options)
        local(momentum).copy_(local(trained.momentum))
        state[trained.param]["momentum_buffer"] = momentum
        moved_params.append(with_momentum(trained, momentum))
    return moved_params


def followed(
    groups: Iterable[Mapping[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    trained: Mapping[str, TrainedParam],
    offload: Offload,
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """(planned parameter, current parameter, state) of each planned parameter. `trained`: by name.

    Raises ValueError for a parameter with a new mesh, placement or shape.
    """
    for fqn, parameter in named_parameters(groups):
        planned = trained.get(fqn)
        if planned is None:
            continue
        values = dict(state.get(parameter) or state[planned.param])
        if placement_key(parameter) != planned.key:
            raise ValueError(
                f"{fqn}: resharded since Muon was built, and its momentum does not fit; build a new optimizer, and "
                "load the momentum from a checkpoint of torch.distributed.checkpoint"
            )
        if offload == "none":
            device = storage_device(parameter)
            values = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}
        yield planned.param, parameter, values


@contextmanager
def unchanged_after_errors(groups: Iterable[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> Iterator[None]:
    """Give an optimizer's groups and state back the present values after an error. Tensors are not copied."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (values, dict(values)) for values in (*groups, *state.values())
    ]
    entries = dict(state)
    try:
        yield
    except BaseException:
        for values, before in kept:
            values.clear()
            values.update(before)
        state.clear()
        state.update(entries)
        raise


def kept_by(trained: TrainedParam) -> tuple[int, ...]:
    """The keepers of a parameter's momentum; empty if every holder is a keeper."""
    momentum = trained.momentum_buffer
    if isinstance(momentum, DTensor) and isinstance(momentum.device_mesh, StateMesh):
        return tuple(momentum.device_mesh.mesh.flatten().tolist())
    return ()


def fits(saved: Tensor, momentum: Tensor, parameter: Tensor) -> bool:
    """Whether a saved momentum is placed like the current momentum or the parameter."""
    return placement_key(saved) in (placement_key(momentum), placement_key(parameter))


def momentum_bytes(elements: int, state_dtype: str) -> int:
    """Bytes of the momentum, with the scales of whole blocks."""
    if state_dtype == "int8":
        return elements + 4 * -(-elements // BLOCK)
    return elements * DTYPES[state_dtype].itemsize


def copy_momentum(saved: Tensor, momentum: Tensor, parameter: Tensor) -> None:
    """Copy this rank's part of a saved momentum."""
    target, source = local(momentum), local(saved)
    if target.numel() == 0:
        return
    if target.shape != source.shape:
        first = int(held_indices(momentum)[0][0] - held_indices(parameter)[0][0])
        source = source.narrow(0, first, target.size(0))
    target.copy_(source)
