"""A check that replicas of weights and states, and hyperparameters, are equal on all ranks: `check_replicas`."""

# [Note: equal replicas]
# - Ranks along a Replicate axis of a mesh hold equal shards. Plain tensors are equal on all ranks, as under DDP.
# - Each rank sums the bits of its shards. One all-reduce with MAX over (sum, ~sum) gives the largest and the smallest
#   sum. If they differ, replicas differ. Only then do ranks send names and sums.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.exchange.agreement import Agreement, start_max
from ..engine.faults.replicas import bit_sums
from ..engine.faults.report import LocalValue, differences, group_label, hyperparameters
from ..engine.tensors.names import named_parameters
from ..engine.tensors.process_groups import without_groups


def tensors_of(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter name, label, tensor) of every parameter and state."""
    for optimizer in optimizers.values():
        for fqn, parameter in named_parameters(optimizer.param_groups):
            yield fqn, fqn, parameter
            for key, state in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(state, Tensor):
                    yield fqn, f"{fqn} ({key})", state


def check_equal(
    optimizers: Mapping[str, Optimizer],
    agreement: Agreement,
    own: Iterable[str] = (),
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Raise ValueError on every rank if replicas or hyperparameters differ between ranks.

    Collective over the agreement's ranks. The host waits for the device and for all ranks. `own`: globs on names of
    plain tensors that each rank trains separately. `buffers`: (name, tensor) of other tensors.
    """
    tensors = chain(tensors_of(optimizers), ((name, name, buffer) for name, buffer in buffers))
    # Together, because a rank with an error would leave the others in a collective.
    values, shards = agreement.raise_on_all_ranks(lambda: _held(optimizers, tensors, tuple(own)))
    differing = {label: values[label] for label in sorted(agreement.differing(values))}
    for (mesh, axes), sums in shards.items():
        differing |= _differing_shards(mesh, axes, sums)
    if text := differences(agreement.gathered(differing)):
        raise ValueError(
            f"values that must be equal on ranks differ: {text}. Each rank would train on from its own: continue from "
            "a checkpoint from before, with the same options, gradients and number of steps on every rank"
        )


def _held(
    optimizers: Mapping[str, Optimizer], tensors: Iterable[tuple[str, str, Tensor]], own: Sequence[str]
) -> tuple[dict[str, LocalValue], dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, int]]]:
    """Hyperparameters and plain tensors by label, and the bit sums of shards by mesh and replicated axes."""
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for fqn, label, tensor in tensors:
        if not isinstance(tensor, DTensor):
            if not any(fnmatchcase(fqn, pattern) for pattern in own):
                plain[label] = tensor
        elif not without_groups(tensor) and (axes := _replica_axes(tensor)):
            shards.setdefault((tensor.device_mesh, axes), {})[label] = tensor
    values = {
        f"{key} of {group_label(name, group)}": LocalValue(text)
        for name, optimizer in optimizers.items()
        for group in optimizer.param_groups
        for key, text in hyperparameters(group).items()
    }
    values |= {label: LocalValue((tuple(plain[label].shape), number)) for label, number in bit_sums(plain).items()}
    return values, {axes: bit_sums(held) for axes, held in shards.items()}


def _replica_axes(tensor: DTensor) -> tuple[int, ...]:
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return ()
    return tuple(a for a, placement in enumerate(tensor.placements) if placement.is_replicate() and mesh.size(a) > 1)


def _differing_shards(mesh: DeviceMesh, axes: Sequence[int], sums: Mapping[str, int]) -> dict[str, LocalValue]:
    """The tensors that differ over the axes of a mesh, by bit sums. Collective over the mesh, with the same names."""
    own = torch.tensor(list(sums.values()), dtype=torch.int64, device=mesh.device_type)
    # The negative overflows for the smallest integer.
    extremes = torch.cat((own, ~own))
    for axis in axes:
        if work := start_max(extremes, mesh.get_group(axis)):
            work.wait()
    largest, smallest = extremes[: len(sums)], ~extremes[len(sums) :]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "ranks outside of a mesh hold no replica"
    shard = tuple(place for axis, place in enumerate(coordinate) if axis not in axes)
    differs = (largest != smallest).tolist()
    return {label: LocalValue(total, shard) for (label, total), d in zip(sums.items(), differs, strict=True) if d}
