"""A trained parameter on this rank: its momentum, its placement, and its local storage as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import local
from .plan.layout import Geometry
from .plan.types import Parameter


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that Muon trains.

    Attributes:
        fqn: its fully qualified name.
        param: the tensor.
        average: its momentum, placed as the parameter is.
        group: hyperparameters of its parameter group, which a scheduler may change between steps.
        key: its placement when the step was planned.
        here: whether this rank is on its mesh, and so has a gradient of it.
        average_device: type of the device that stores its momentum.
    """

    fqn: str
    param: Tensor
    average: Tensor
    group: Mapping[str, Any]
    key: object
    here: bool
    average_device: str


@dataclass(frozen=True)
class LocalViews:
    """This rank's storage of a parameter as (rows, cols) views: values, momentum, and gradient (None once released).

    Where the gradient is `missing` the momentum stays, and the update is zero.
    """

    param: Tensor
    average: Tensor
    grad: Tensor | None
    missing: bool = False


def local_views(trained: TrainedParam, planned: Parameter) -> LocalViews:
    """The views of a parameter, with its gradient if there is one."""
    grad = trained.param.grad
    shape, row_dims = local(trained.param).shape, planned.stack.row_dims
    rows, cols = prod(shape[:row_dims]), prod(shape[row_dims:])
    # view() for what is updated, since an update of a copy would be lost; the gradient is only read.
    param, average = (local(tensor).view(rows, cols) for tensor in (trained.param, trained.average))
    return LocalViews(param, average, None if grad is None else local(grad).reshape(rows, cols), missing=grad is None)


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
