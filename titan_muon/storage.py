"""What a parameter is on this rank: its tensors as 2D views, and the rectangles of them that are pieces of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .layouts import local
from .plan.layout import Geometry
from .plan.types import Parameter, Piece, Segment


@dataclass(frozen=True)
class Span:
    """One rectangle of a piece: where it is in local storage, in the whole matrix and in the piece itself."""

    local: tuple[slice, slice]
    whole: tuple[slice, slice]
    piece: tuple[slice, slice]


def spans(piece: Piece) -> tuple[Span, ...]:
    """The rectangles of a piece."""
    return tuple(
        Span(
            (slice(row.local, row.local + row.length), slice(col.local, col.local + col.length)),
            (slice(row.whole, row.whole + row.length), slice(col.whole, col.whole + col.length)),
            (slice(row_start, row_start + row.length), slice(col_start, col_start + col.length)),
        )
        for row, row_start in _starts(piece.rows)
        for col, col_start in _starts(piece.cols)
    )


def _starts(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    start = 0
    for segment in segments:
        yield segment, start
        start += segment.length


@dataclass(frozen=True)
class Member:
    """A trained parameter: its name, the tensor, its momentum, and the group with its hyperparameters."""

    fqn: str
    parameter: Tensor
    average: Tensor
    group: dict[str, Any]


@dataclass(frozen=True)
class Storage:
    """This rank's part of a parameter as 2D views: values, momentum, and gradient (None once released)."""

    param: Tensor
    average: Tensor
    grad: Tensor | None


def check_storage(member: Member, geometry: Geometry, rank: int) -> None:
    """Raise ValueError unless the rank stores what the parameter's layout says, contiguously."""
    stored, shape = local(member.parameter), geometry.local_shape.get(rank)
    if shape is None:
        return
    if tuple(stored.shape) != shape:
        raise ValueError(f"{member.fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}")
    if not stored.is_contiguous():
        raise ValueError(f"{member.fqn}: its storage is not contiguous; call contiguous() before building Muon")


def storage_of(member: Member, planned: Parameter) -> Storage:
    """The views of a parameter with a gradient. Raises ValueError if the gradient rests elsewhere."""
    grad = member.parameter.grad
    assert grad is not None, f"{member.fqn}: checked for a gradient before"
    if _placing(grad) != _placing(member.parameter) or local(grad).shape != local(member.parameter).shape:
        raise ValueError(
            f"{member.fqn}: its gradient rests as {_placing(grad)} and the parameter as {_placing(member.parameter)}; "
            "redistribute the gradient"
        )
    shape, split = local(member.parameter).shape, planned.stack.row_dims
    rows, cols = prod(shape[:split]), prod(shape[split:])
    return Storage(*(local(tensor).reshape(rows, cols) for tensor in (member.parameter, member.average, grad)))


def _placing(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else "a plain tensor"
