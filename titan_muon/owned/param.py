"""An owned parameter at rest: a DTensor on the ranks that hold it, with all other ranks as non-participants.

Its mesh has a first axis, `owner`, of one rank; then the replicas of HSDP, if each has an owner; then the axes of
tensor parallelism, whose pieces stay where they are. A rank outside of the mesh has the parameter's global shape and no
elements. DTensor operations, optimizer states and distributed checkpoints treat that as they treat any placement.
"""

from __future__ import annotations

from math import prod

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..dtensor import layout_of
from ..plan.layout import region
from . import private

OWNER_AXIS = "owner"
DATA_AXES = ("replicate", "shard")
"""Names of the axes of a data-parallel mesh that has none."""


def is_owned(tensor: Tensor) -> bool:
    """Whether a parameter, its gradient or its optimizer state rests whole on an owner."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, private.OwnerMesh)


def holders(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks that have elements of an owned tensor."""
    return tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())


def held_elements(tensor: DTensor) -> dict[int, int]:
    """Elements of an owned tensor that each of its holders has, by global rank."""
    layout = layout_of("", tensor)
    return {
        rank: prod(sum(stop - start for start, stop in dim) for dim in region(layout, layout.mesh.coordinate(position)))
        for position, rank in enumerate(layout.mesh.ranks)
    }


def owner_mesh(data: DeviceMesh, inner: DeviceMesh | None, owner: int) -> private.OwnerMesh:
    """The mesh on which a parameter rests that rank `owner` of the last axis of `data` owns.

    Args:
        data: the data-parallel mesh, (shard,) or (replicate, shard).
        inner: the mesh of the parameter itself (tensor parallelism), a slice of the same mesh as `data`, or None.
    """
    joint = data if inner is None else private.joint_mesh(data, inner)
    data_names = data.mesh_dim_names or DATA_AXES[-data.ndim :]
    names = (*data_names[:-1], *(() if inner is None else inner.mesh_dim_names or ()))
    ranks = joint.mesh.select(data.ndim - 1, owner).unsqueeze(0)
    return private.OwnerMesh(ranks, (OWNER_AXIS, *names), data, owner, inner)


def at_rest(parameter: Tensor, data: DeviceMesh, owner: int) -> nn.Parameter:
    """A parameter, a plain tensor or a DTensor of tensor parallelism, as it rests on its owner.

    The owner keeps the parameter's own storage.
    """
    inner = parameter.device_mesh if isinstance(parameter, DTensor) else None
    mesh = owner_mesh(data, inner, owner)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    local = parameter.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    if mesh.get_coordinate() is None:
        local = local.new_empty(0)
    resting = DTensor.from_local(
        local,
        mesh,
        [*[Replicate()] * (mesh.ndim - len(placements)), *placements],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(resting, requires_grad=parameter.requires_grad)


def placed_like(local: Tensor, resting: DTensor) -> DTensor:
    """A local tensor on the holders of `resting`, as its gradient for example."""
    return DTensor.from_local(
        local,
        resting.device_mesh,
        resting.placements,
        run_check=False,
        shape=resting.shape,
        stride=resting.stride(),
    )
