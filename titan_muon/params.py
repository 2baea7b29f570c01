"""What a trained parameter is on this rank, and what may be wrong with it in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import local
from .plan.layout import Geometry
from .plan.types import Parameter


@dataclass(frozen=True)
class Member:
    """A trained parameter.

    Attributes:
        fqn: its name.
        parameter: the tensor.
        average: its momentum.
        group: the hyperparameters.
        placing: how it rested when the step was planned.
        here: whether this rank is on its mesh, and so has a gradient of it.
    """

    fqn: str
    parameter: Tensor
    average: Tensor
    group: dict[str, Any]
    placing: object
    here: bool


@dataclass(frozen=True)
class Storage:
    """This rank's part of a parameter as 2D views: values, momentum, and gradient (None once released)."""

    param: Tensor
    average: Tensor
    grad: Tensor | None


class Fault(IntEnum):
    """What keeps a parameter from being updated in this step; of several ranks' faults the largest counts."""

    NONE = 0
    NOT_FINITE = 1
    NO_GRADIENT = 2
    GRADIENT_ELSEWHERE = 3
    RESHARDED = 4
    REPROGRAMMED = 5


REMEDIES: Mapping[Fault, str] = {
    Fault.NOT_FINITE: "{names}: gradient or momentum was not finite in an earlier step, whose update of those matrices "
    "was zero; lower the learning rate, clip gradients, or go on without those updates (muon.nonfinite = 'skip')",
    Fault.NO_GRADIENT: "no gradient for {names}: use the parameter in the loss, freeze it before building Muon "
    "(requires_grad = False), give it to another optimizer, or skip it in such steps (muon.missing_grad = 'skip')",
    Fault.GRADIENT_ELSEWHERE: "{names}: its gradient rests otherwise than the parameter; redistribute the gradient",
    Fault.RESHARDED: "{names}: resharded since Muon was built; build a new optimizer",
    Fault.REPROGRAMMED: "{names}: ns_steps, ns_coefficients or eps changed since Muon was built; build it anew",
}


def fault_of(member: Member) -> Fault:
    """What is wrong with a parameter on this rank now."""
    grad = member.parameter.grad
    if not member.here:
        return Fault.NONE
    if placing(member.parameter) != member.placing or not local(member.parameter).is_contiguous():
        return Fault.RESHARDED
    if grad is None:
        return Fault.NO_GRADIENT
    if placing(grad) != member.placing:
        return Fault.GRADIENT_ELSEWHERE
    return Fault.NONE


def check_faults(members: Sequence[Member], faults: Sequence[Fault], allowed: Collection[Fault]) -> None:
    """Raise ValueError naming the parameters with a fault that is not `allowed`, and what to do."""
    for fault, remedy in REMEDIES.items():
        names = faulty(members, faults, fault)
        if names and fault not in allowed:
            raise ValueError(remedy.format(names=names))


def faulty(members: Sequence[Member], faults: Sequence[Fault], fault: Fault) -> str:
    """The names of the parameters with a fault; empty if there are none."""
    names = [member.fqn for member, found in zip(members, faults, strict=True) if found == fault]
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def storage_fault(fqn: str, parameter: Tensor, geometry: Geometry, rank: int) -> str | None:
    """What keeps this rank's storage from being what the parameter's layout says, or None."""
    stored, shape = local(parameter), geometry.local_shape.get(rank)
    if shape is None:
        return None
    if tuple(stored.shape) != shape:
        return f"{fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}"
    if not stored.is_contiguous():
        return f"{fqn}: its storage is not contiguous; call contiguous() before building Muon"
    return None


def storage_of(member: Member, planned: Parameter) -> Storage:
    """The views of a parameter that has a gradient."""
    grad = member.parameter.grad
    assert grad is not None, f"{member.fqn}: checked for a gradient before"
    shape, split = local(member.parameter).shape, planned.stack.row_dims
    rows, cols = prod(shape[:split]), prod(shape[split:])
    # Views of what is updated; the gradient is only read, so it may be a copy.
    param, average = (local(tensor).view(rows, cols) for tensor in (member.parameter, member.average))
    return Storage(param, average, local(grad).reshape(rows, cols))


def placing(tensor: Tensor) -> object:
    """How a tensor rests, to compare: mesh, placements and local shape."""
    where = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return where, tuple(local(tensor).shape)
