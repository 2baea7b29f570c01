"""A check that weights, states and hyperparameters are equal on all ranks with replicas."""

# [Note: replicas]
# - Ranks along a Replicate axis of a mesh hold equal shards. Plain tensors are equal on all ranks, as under DDP.
# - Each rank sums the bits of its shards. One all-reduce with MAX over (sum, ~sum) gives the largest and the smallest
#   sum. If they differ, replicas differ. Only then do ranks send names and sums.

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..tensors.dtensor import local
from ..tensors.mesh import without_groups
from ..tensors.names import named_parameters, names_in
from .agreement import Agreement
from .replicas import bit_sum, hyperparameters

LISTED = 5
"""Differences in an error text."""


class LocalValue(NamedTuple):
    """A value on this rank. `shard`: coordinates; only equal shards can be compared."""

    value: Hashable
    shard: tuple[int, ...] = ()
    is_tensor: bool = True


def tensors_of(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter name, label, tensor) of every parameter and state."""
    for optimizer in optimizers.values():
        for fqn, parameter in named_parameters(optimizer.param_groups):
            yield fqn, fqn, parameter
            for key, state in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(state, Tensor):
                    yield fqn, f"{fqn} ({key})", state


def group_label(name: str, group: Mapping[str, Any]) -> str:
    """Text for errors."""
    return f"{name}'s group of {names_in(group)[0]}" if group["params"] else f"{name}'s empty group"


def labeled(optimizers: Mapping[str, Optimizer]) -> dict[str, Hashable]:
    """The hyperparameters of every group."""
    return {
        f"{key} of {group_label(name, group)}": value
        for name, optimizer in optimizers.items()
        for group in optimizer.param_groups
        for key, value in hyperparameters(group).items()
    }


def check_equal(
    optimizers: Mapping[str, Optimizer],
    agreement: Agreement,
    own: Iterable[str] = (),
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Raise ValueError on every rank if replicas or hyperparameters differ between ranks.

    Collective over the agreement's ranks. The host waits for the device and for all ranks. `own`: globs on names of
    plain tensors that each rank trains separately. `buffers`: (name, tensor) of further tensors.
    """
    tensors = chain(tensors_of(optimizers), ((name, name, buffer) for name, buffer in buffers))
    # Together, because a rank with an error would leave the others in a collective.
    values, shards = agreement.together(lambda: _held(optimizers, tensors, tuple(own)))
    differing = {label: values[label] for label in sorted(agreement.differing(values))}
    for (mesh, axes), sums in shards.items():
        differing |= _differing_shards(mesh, axes, sums)
    if agreement.any_rank(bool(differing)):
        lines = _lines(agreement.gathered(differing))
        raise ValueError(
            f"values that must be equal on ranks differ: {lines}. Each rank would train on from its own: continue from "
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
    values: dict[str, LocalValue] = {
        label: LocalValue(text, is_tensor=False) for label, text in labeled(optimizers).items()
    }
    values |= {label: LocalValue((tuple(plain[label].shape), number)) for label, number in _sums(plain).items()}
    return values, {axes: _sums(held) for axes, held in shards.items()}


def difference(everywhere: Mapping[int, Mapping[str, Hashable]]) -> str:
    """The values that differ between ranks as text."""
    labels = dict.fromkeys(label for values in everywhere.values() for label in values)
    differing = {
        label for label in labels if len({values[label] for values in everywhere.values() if label in values}) > 1
    }
    return _lines(
        {
            rank: {label: LocalValue(value, is_tensor=False) for label, value in values.items() if label in differing}
            for rank, values in everywhere.items()
        }
    )


def _replica_axes(tensor: DTensor) -> tuple[int, ...]:
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return ()
    return tuple(a for a, placement in enumerate(tensor.placements) if placement.is_replicate() and mesh.size(a) > 1)


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bit sums, with one transfer per device."""
    sums: dict[str, Tensor] = {label: bit_sum(local(tensor)) for label, tensor in tensors.items()}
    numbers: dict[str, int] = {}
    for device in dict.fromkeys(total.device for total in sums.values()):
        labels = [label for label, total in sums.items() if total.device == device]
        numbers |= zip(labels, torch.stack([sums[label] for label in labels]).tolist(), strict=True)
    return {label: numbers[label] for label in tensors}


def _differing_shards(mesh: DeviceMesh, axes: Sequence[int], sums: Mapping[str, int]) -> dict[str, LocalValue]:
    """The tensors that differ over the axes of a mesh, by bit sums. Collective over the mesh, with the same names."""
    own = torch.tensor(list(sums.values()), dtype=torch.int64, device=mesh.device_type)
    # The negative overflows for the smallest integer.
    extremes = torch.cat((own, ~own))
    for axis in axes:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    largest, smallest = extremes[: len(sums)], ~extremes[len(sums) :]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "ranks outside of a mesh hold no replica"
    shard = tuple(place for axis, place in enumerate(coordinate) if axis not in axes)
    differs = (largest != smallest).tolist()
    return {label: LocalValue(total, shard) for (label, total), d in zip(sums.items(), differs, strict=True) if d}


def _lines(everywhere: Mapping[int, Mapping[str, LocalValue]]) -> str:
    labels = list(dict.fromkeys(label for held in everywhere.values() for label in held))
    more = f"; and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
    return "; ".join(_line(label, everywhere) for label in labels[:LISTED]) + more


def _line(label: str, everywhere: Mapping[int, Mapping[str, LocalValue]]) -> str:
    ranks: dict[tuple[int, ...], dict[Hashable, list[int]]] = {}
    is_tensor = True
    for rank, held in everywhere.items():
        if label in held:
            is_tensor = held[label].is_tensor
            ranks.setdefault(held[label].shard, {}).setdefault(held[label].value, []).append(rank)
    if not is_tensor:
        (values,) = ranks.values()
        return f"{label} is " + " and ".join(f"{value} on ranks {where}" for value, where in values.items())
    # The majority is right most likely.
    texts = []
    for values in ranks.values():
        first, *others = sorted(values.values(), key=lambda where: (-len(where), where))
        texts.append(f"ranks {sorted(rank for other in others for rank in other)} differ from ranks {first}")
    return f"{label}: {', '.join(texts)}"
