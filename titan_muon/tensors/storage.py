"""A trained parameter on this rank: its momentum, its placement, and its local storage as matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from ..plan.terms.layout import Geometry
from ..plan.terms.types import Parameter
from .dtensor import held_indices, layout_of, local

STEP = "step"
"""Key of a parameter group: steps taken, where a step draws."""


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that Muon trains.

    Attributes:
        fqn: its fully qualified name.
        param: the tensor.
        average: its momentum, placed as the parameter is, or as one copy of it; None before it is planned where.
        group: hyperparameters of its parameter group, which a scheduler may change between steps.
        key: its placement when the step was planned.
        here: whether this rank is on its mesh, and so has a gradient of it.
        stored: dtype and device of its local tensor when the step was planned.
        average_device: type of the device that stores its momentum.
    """

    fqn: str
    param: Tensor
    average: Tensor | None
    group: Mapping[str, Any]
    key: object
    here: bool
    stored: tuple[torch.dtype, torch.device]
    average_device: str = ""

    @property
    def momentum(self) -> Tensor:
        """The average, which is there once the plan is."""
        assert self.average is not None, f"{self.fqn}: a step before its momentum was made"
        return self.average


def with_average(trained: TrainedParam, average: Tensor) -> TrainedParam:
    """A parameter with this momentum."""
    return replace(trained, average=average, average_device=local(average).device.type)


def trained_params(
    groups: Iterable[dict[str, Any]], state: Mapping[Tensor, Mapping[str, Any]], rank: int, *, stochastic: bool
) -> Iterator[TrainedParam]:
    """The trained parameters of an optimizer's groups, with the momentum that is in its state.

    With `stochastic` a group of bfloat16 weights counts its steps. Raises ValueError for a parameter that is given
    twice, or has no storage.
    """
    seen: set[str] = set()
    for group in groups:
        for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
            if fqn in seen:
                raise ValueError(f"{fqn}: given to Muon twice; give every parameter once")
            seen.add(fqn)
            if not parameter.requires_grad:
                continue
            if parameter.is_meta:
                raise ValueError(f"{fqn}: on the meta device; give it storage (to_empty) before building Muon")
            if stochastic and parameter.dtype == torch.bfloat16:
                # Only there, so that checkpoints of other weights have no more keys than they had.
                group.setdefault(STEP, 0)
            here = rank in layout_of(fqn, parameter).mesh.ranks
            shard = local(parameter)
            key = placement_key(parameter)
            trained = TrainedParam(fqn, parameter, None, group, key, here, (shard.dtype, shard.device))
            average = state.get(parameter, {}).get("momentum_buffer")
            yield trained if average is None else with_average(trained, average)


@dataclass(frozen=True)
class Storage:
    """This rank's storage of a parameter and its momentum as (rows, cols) views, which are made once.

    The momentum may have some of the rows alone, from `first_row` on, or none. `local` and the storages are those that
    the views were made of.
    """

    param: Tensor
    average: Tensor
    local: Tensor
    param_storage: UntypedStorage
    average_storage: UntypedStorage
    first_row: int = 0

    def is_of(self, trained: TrainedParam) -> bool:
        """Whether the parameter and its momentum are still stored there."""
        there = local(trained.momentum).untyped_storage() is self.average_storage
        return there and self.is_of_weights(trained)

    def is_of_weights(self, trained: TrainedParam) -> bool:
        """Whether the parameter is still stored there, wherever its momentum is."""
        stored = local(trained.param)
        # `param.data = ...` gives the same tensor another storage. A storage that is referred to is one object.
        return stored is self.local and stored.untyped_storage() is self.param_storage


def storage_of(trained: TrainedParam, planned: Parameter) -> Storage:
    """The views of a parameter's storage."""
    stored, average = local(trained.param), local(trained.momentum)
    size = rows, cols = matrix_size(stored, planned)
    first = 0
    if average.numel() < stored.numel():
        rows, height = average.numel() // cols, prod(stored.shape[1 : planned.stack.row_dims])
        first = height * int(held_indices(trained.momentum)[0][0]) if rows else 0
    # view() for what is updated, since an update of a copy would be lost.
    views = stored.detach().view(size), average.view(rows, cols)
    return Storage(*views, stored, stored.untyped_storage(), average.untyped_storage(), first)


def matrix_size(stored: Tensor, planned: Parameter) -> tuple[int, int]:
    """Rows and columns of a local tensor of a parameter."""
    split = planned.stack.row_dims
    return prod(stored.shape[:split]), prod(stored.shape[split:])


def placement_key(tensor: Tensor) -> object:
    """What says that two tensors have the same storage on every rank: mesh, placements and local shape."""
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return placed, tuple(local(tensor).shape)


def storage_fault(fqn: str, parameter: Tensor, geometry: Geometry, rank: int) -> str | None:
    """What keeps this rank's storage from being what the parameter's layout says, or None."""
    stored, shape = local(parameter), geometry.local_shape.get(rank)
    if shape is None:
        return None
    # DTensor's own spec is wrong for some uneven shards (FSDP2 over TP, rows that neither divides): pieces would be
    # read from beside where they are.
    if tuple(stored.shape) != shape:
        return f"{fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}"
    if not stored.is_contiguous():
        return f"{fqn}: its storage is not contiguous; call contiguous() before building Muon"
    return None
