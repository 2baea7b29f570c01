"""The momentum of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..options import MuonOptions, Offload
from ..orthogonalize import DTYPES
from ..plan.terms.layout import chunk
from ..plan.terms.types import Parameter
from ..tensors.dtensor import from_local, local, step_device, storage_device
from ..tensors.mesh import StateMesh
from ..tensors.names import named_parameters
from ..tensors.storage import TrainedParam, placement_key, with_momentum
from .eight_bit import BLOCK, SCALES, new_scales
from .host import moved_state, new_state


def with_states(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
) -> tuple[TrainedParam, ...]:
    """The parameters with their momentum, created in the optimizer's `state` if missing."""
    complete = []
    for trained, parameter in zip(params, planned, strict=True):
        states = state[trained.param]
        if trained.momentum_buffer is None:
            momentum = states["momentum_buffer"] = new_momentum(trained.param, parameter, options)
            trained = with_momentum(trained, momentum)
        if options.state_dtype == "int8" and trained.scales is None:
            trained = replace(trained, scales=states.setdefault(SCALES, new_scales(trained.param)))
        complete.append(trained)
    return tuple(complete)


def new_momentum(parameter: Tensor, planned: Parameter, options: MuonOptions) -> Tensor:
    """Momentum of zeros: placed like the parameter, or like one replica on the keepers (`planned.state_ranks`)."""
    dtype = torch.int8 if options.state_dtype == "int8" else DTYPES[options.state_dtype]
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


def momentum_bytes(elements: int, state_dtype: str) -> int:
    """Bytes of the momentum, with the scales of whole blocks."""
    if state_dtype == "int8":
        return elements + 4 * -(-elements // BLOCK)
    return elements * DTYPES[state_dtype].itemsize
