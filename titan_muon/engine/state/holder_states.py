"""States placed like a parameter, on the device or on the host: the momentum, and the averages of AdamW."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...options import MuonOptions, Offload
from ..layout.intervals import chunk
from ..layout.types import Parameter
from ..tensors.device import is_host
from ..tensors.dtensor import copy_rows, from_local, local, step_device, storage_device
from ..tensors.names import named_parameters
from ..tensors.process_groups import StateMesh, refuse_reads_outside
from ..tensors.storage import TrainedParam, placement_key, with_momentum


def with_states(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
    empty: Collection[int] = (),
) -> tuple[TrainedParam, ...]:
    """The parameters with their momentum, created in the optimizer's `state` if missing or without elements.

    `empty`: numbers of parameters whose momentum has no elements.
    """
    complete = []
    for number, (trained, parameter) in enumerate(zip(params, planned, strict=True)):
        momentum = trained.momentum_buffer
        if momentum is None or (number not in empty and not momentum.numel()):
            momentum = torch.zeros(0, device=storage_device(trained.param))
            if number not in empty:
                momentum = new_momentum(trained.param, parameter, options)
            state[trained.param]["momentum_buffer"] = momentum
            trained = with_momentum(trained, momentum)
        complete.append(trained)
    return tuple(complete)


def new_momentum(parameter: Tensor, planned: Parameter, options: MuonOptions) -> Tensor:
    """Momentum of zeros: placed like the parameter, or like one replica on the keepers (`planned.state_ranks`)."""
    dtype: torch.dtype = getattr(torch, options.state_dtype)
    if not planned.state_ranks:
        return new_state(parameter, dtype, options.offload)
    return new_state(parameter, dtype, options.offload, _replica(parameter, planned.state_ranks))


def _replica(parameter: Tensor, ranks: tuple[int, ...]) -> DTensor:
    """A meta tensor like one replica of a parameter, on `ranks`. They divide the rows of a whole replica."""
    cut: list[tuple[int, Any]] = []
    if isinstance(parameter, DTensor):
        axes = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
        cut = [(size, placement) for size, placement in axes if placement != Replicate()]
    shape = [size for size, _ in cut] or [-1]
    mesh = StateMesh(step_device(parameter).type, torch.tensor(ranks, device="cpu").view(shape))
    coordinate, stored = mesh.get_coordinate(), [0]
    if coordinate is not None:
        stored = list(local(parameter).shape)
        if not cut:
            start, stop = chunk(stored[0], len(ranks), coordinate[0])
            stored[0] = stop - start
    placements = [placement for _, placement in cut] or [Shard(0)]
    return from_local(torch.empty(stored, device="meta"), mesh, placements, parameter)


def moved(
    params: Iterable[TrainedParam], state: Mapping[Tensor, dict[str, Any]], offload: Offload
) -> list[TrainedParam]:
    """The parameters with copies of the momentum on the host or the device, also in the optimizer's `state`."""
    moved_params = []
    for trained in params:
        momentum = moved_state(trained.momentum, trained.param, offload)
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
        if fqn not in trained:
            continue
        planned = trained[fqn]
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
    dicts: list[dict[Any, Any]] = [*groups, *state.values(), state]
    kept = [(values, dict(values)) for values in dicts]
    try:
        yield
    except BaseException:
        for values, before in kept:
            values.clear()
            values.update(before)
        raise


def kept_by(trained: TrainedParam) -> tuple[int, ...]:
    """The keepers of a parameter's momentum; empty if every holder is a keeper."""
    momentum = trained.momentum_buffer
    if isinstance(momentum, DTensor) and isinstance(momentum.device_mesh, StateMesh):
        return tuple(momentum.device_mesh.mesh.flatten().tolist())
    return ()


def new_state(parameter: Tensor, dtype: torch.dtype, offload: Offload, like: Tensor | None = None) -> Tensor:
    """A state of zeros, placed like the parameter or `like`; pinned if on the host."""
    like = parameter if like is None else like
    if offload == "none":
        state = torch.zeros_like(like, dtype=dtype, device=storage_device(parameter))
    else:
        # Copies are asynchronous only from pinned memory, and pinning needs an accelerator.
        pinned = not is_host(step_device(parameter))
        state = torch.zeros_like(like, dtype=dtype, device="cpu", pin_memory=pinned)
    if isinstance(state, DTensor) and isinstance(state.device_mesh, StateMesh):
        refuse_reads_outside(state, StateMesh.refusal)
    copy_rows(parameter, state)
    return state


def moved_state(state: Tensor, parameter: Tensor, offload: Offload) -> Tensor:
    """A copy of a state, on the device or the host as `new_state`."""
    moved = new_state(parameter, state.dtype, offload, state)
    local(moved).copy_(local(state))
    return moved


def resolved(chosen: Offload, parameters: Iterable[Tensor]) -> Offload:
    """The chosen offload, or "parameters" if FSDP's CPUOffloadPolicy keeps a parameter on the host."""
    offloaded = any(storage_device(parameter).type != step_device(parameter).type for parameter in parameters)
    return "parameters" if offloaded else chosen


def moves(now: Offload, to: Offload) -> bool:
    """Whether states have to move. Raises ValueError for a reload with parameters on the host."""
    if now == "parameters" and to == "none":
        raise ValueError("reload: the parameters are on the host (CPUOffloadPolicy), and so must be the states")
    return now not in (to, "parameters")
