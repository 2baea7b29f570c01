"""The momentum of a parameter: where it is, and how it is made, moved and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..options import MuonOptions, Offload, OptionError
from ..orthogonalize import DTYPES
from ..plan.terms.layout import chunk
from ..plan.terms.types import Parameter
from ..tensors.dtensor import held_indices, local, storage_device
from ..tensors.mesh import StateMesh, without_groups
from ..tensors.storage import TrainedParam, placement_key, with_average
from .host import new_state, state_like


def check_not_owned(parameters: Mapping[str, Tensor], options: MuonOptions) -> None:
    """Raise OptionError for the momentum of owned placement, which is on its owner alone as it is."""
    for fqn, parameter in parameters.items() if options.state == "owner" else ():
        if without_groups(parameter):
            said = f"{fqn} is owned, and its momentum is on its owner alone already"
            raise OptionError("state", f'= "owner": {said}; set "replicated"')


def with_states(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
) -> tuple[TrainedParam, ...]:
    """The parameters with their momentum, which is made and put into the optimizer's `state` where there is none."""
    found = []
    for trained, parameter in zip(params, planned, strict=True):
        if trained.average is None:
            average = new_average(trained.param, parameter, options)
            state[trained.param]["momentum_buffer"] = average
            trained = with_average(trained, average)
        found.append(trained)
    return tuple(found)


def new_average(parameter: Tensor, planned: Parameter, options: MuonOptions) -> Tensor:
    """Momentum of zeros: placed as the parameter is, or as one copy of it on the ranks that keep it."""
    dtype = DTYPES[options.state_dtype]
    if not planned.state_ranks:
        return new_state(parameter, dtype, options.offload)
    cut: list[tuple[int, Any]] = []
    kind = parameter.device.type
    if isinstance(parameter, DTensor):
        kind, axes = parameter.device_mesh.device_type, parameter.device_mesh.mesh.shape
        cut = [(size, each) for size, each in zip(axes, parameter.placements, strict=True) if each != Replicate()]
    ranks = torch.tensor(planned.state_ranks, device="cpu")
    mesh = StateMesh(kind, ranks.view([size for size, _ in cut] or [-1]))
    placements = [placement for _, placement in cut] or [Shard(0)]
    coordinate = mesh.get_coordinate()
    shape = [0] if coordinate is None else list(local(parameter).shape)
    if coordinate is not None and not cut:
        start, stop = chunk(shape[0], len(ranks), coordinate[0])
        shape[0] = stop - start
    held = state_like(parameter, shape, dtype, options.offload)
    size, stride = parameter.shape, parameter.stride()
    average = DTensor.from_local(held, mesh, placements, run_check=False, shape=size, stride=stride)
    if coordinate is None:
        # PyTorch's own would give an empty tensor, without a word.
        for read in ("full_tensor", "redistribute"):
            setattr(average, read, _refuse)
    return average


def moved(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
) -> list[TrainedParam]:
    """The parameters with their momentum where `options` have it, which is put into the optimizer's `state`."""
    found = []
    for trained, parameter in zip(params, planned, strict=True):
        average = new_average(trained.param, parameter, options)
        local(average).copy_(local(trained.momentum))
        state[trained.param]["momentum_buffer"] = average
        found.append(with_average(trained, average))
    return found


def followed(
    groups: Iterable[Mapping[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    trained: Mapping[str, TrainedParam],
    offload: Offload,
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """(planned parameter, parameter now, state) of each parameter of the plan that is still in the groups.

    Args:
        groups: the optimizer's parameter groups.
        state: the optimizer's state.
        trained: by name, the parameters of the plan.
        offload: tensors that are on the host.

    Raises:
        ValueError: for a parameter with another mesh, other placements, or another shape than in the plan.
    """
    for group in groups:
        for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
            planned = trained.get(fqn)
            if planned is None:
                continue
            kept = dict(state.get(parameter) or state[planned.param])
            if placement_key(parameter) != planned.key:
                raise ValueError(
                    f"{fqn}: resharded since Muon was built, and its momentum does not fit; build a new optimizer, and "
                    "load the momentum from a checkpoint of torch.distributed.checkpoint"
                )
            if offload == "none":
                device = storage_device(parameter)
                kept = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kept.items()}
            yield planned.param, parameter, kept


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(StateMesh.refusal)


def kept_by(trained: TrainedParam) -> tuple[int, ...]:
    """The ranks that keep a parameter's momentum, if these are not all that have the parameter."""
    average = trained.average
    if isinstance(average, DTensor) and isinstance(average.device_mesh, StateMesh):
        return tuple(average.device_mesh.mesh.flatten().tolist())
    return ()


def fits(saved: Tensor, average: Tensor, parameter: Tensor) -> bool:
    """Whether a saved momentum can be copied to where this rank's is: it is placed alike, or as the parameter."""
    return placement_key(saved) in (placement_key(average), placement_key(parameter))


def copy_average(saved: Tensor, average: Tensor, parameter: Tensor) -> None:
    """Copy a saved momentum, or the part of it that is kept here."""
    kept, source = local(average), local(saved)
    if kept.numel() == 0:
        return
    if kept.shape != source.shape:
        first = int(held_indices(average)[0][0] - held_indices(parameter)[0][0])
        source = source.narrow(0, first, kept.size(0))
    kept.copy_(source)
