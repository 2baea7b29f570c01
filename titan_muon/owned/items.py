"""What owners are balanced by: the FLOPs and bytes of each parameter, whole or as tensor parallelism cuts it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..dtensor import layer_of
from ..matrices import stack_of
from ..options import Owner, Split
from ..plan.cost import standard_flops
from ..plan.ownership import OwnedItem
from ..plan.types import MatrixStack
from .inner import Inner

FlopCount = Callable[[int, int], int]
"""FLOPs of orthogonalizing a matrix of (rows, columns)."""

FIVE_STANDARD_STEPS: FlopCount = partial(standard_flops, steps=5)


def cut_by_peers(parameters: Mapping[str, Tensor]) -> dict[str, DeviceMesh]:
    """The parameters that tensor parallelism cuts, each with its mesh, the same for all.

    Raises ValueError for what no single rank can hold for its peers.
    """
    found: dict[str, DeviceMesh] = {}
    for fqn, parameter in parameters.items():
        inner = Inner.of(parameter)
        if inner.mesh is None or all(placement.is_replicate() for placement in inner.placements):
            continue
        other = next(iter(found.values()), inner.mesh)
        if inner.mesh.ndim > 1 or type(inner.placements[0]) is not Shard or inner.mesh != other:
            raise ValueError(
                f"{fqn}: is placed as {inner.placements} on {inner.mesh}; tensor_parallel = 'whole' takes what "
                "Shard cuts on one mesh of one axis: leave it to 'peers'"
            )
        found[fqn] = inner.mesh
    return found


def owned_items(
    parameters: Mapping[str, Tensor],
    owners: Mapping[str, Owner],
    *,
    gathered: Mapping[str, DeviceMesh],
    split: Sequence[Split],
    flops: FlopCount,
    elementwise: Collection[Tensor],
) -> list[OwnedItem]:
    """What each parameter weighs.

    One of the peers on their mesh holds all of what is `gathered`, and then each of them a copy of everything else.
    """
    peers = next((mesh.size() for mesh in gathered.values()), 1)
    items = []
    for fqn, parameter in parameters.items():
        counted = None if parameter in elementwise or parameter.ndim < 2 else flops
        item = _item(fqn, parameter, owners[fqn], split, counted, whole=fqn in gathered)
        items.append(item if fqn in gathered else replace(item, copies=peers))
    return items


def _item(
    fqn: str, parameter: Tensor, owner: Owner, split: Sequence[Split], flops: FlopCount | None, *, whole: bool
) -> OwnedItem:
    """What a parameter weighs, or with `whole` all pieces of it together; without `flops`, its bytes alone."""
    inner = Inner.of(parameter)
    held = parameter.shape if whole else inner.size(parameter.shape)
    size = held.numel() * parameter.element_size()
    if flops is None:
        return OwnedItem(fqn, layer_of(fqn), 0, size, owner=owner)
    stack = stack_of(fqn, parameter.shape, split)
    columns = prod(parameter.shape[stack.row_dims :])
    cost = sum(flops(*matrix.shape(columns)) for matrix in stack.matrices)
    # Pieces along dim 0 come together as a whole alone: parts of several owners have no rows of their own in a piece.
    if not _is_stack(parameter, stack) or (whole and inner.placements[0].is_shard(0)):
        return OwnedItem(fqn, layer_of(fqn), cost, size, owner=owner)
    # Of a stack that expert parallelism has cut, this rank and its peers divide what is theirs.
    return OwnedItem(fqn, layer_of(fqn), cost * held[0] // len(parameter), size, held[0], owner)


def _is_stack(parameter: Tensor, stack: MatrixStack) -> bool:
    """Whether no matrix of a parameter has rows of two of its slices along dim 0."""
    height = prod(parameter.shape[1 : stack.row_dims])
    return stack.row_dims > 1 and all(
        matrix.rows[0].start // height == (matrix.rows[-1].stop - 1) // height for matrix in stack.matrices
    )
