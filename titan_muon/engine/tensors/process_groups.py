"""Process groups, and meshes without them, by private parts of PyTorch that tests check for each version."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .names import warn


def default_store() -> dist.Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta | None:
    """The timeout of a group's backend for a type of device; None without this backend."""
    try:
        timeout = getattr(group._get_backend(torch.device(device)).options, "_timeout", None)
    except (AttributeError, RuntimeError):
        # The fake backend has no options.
        return None
    return timeout if isinstance(timeout, timedelta) else None


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Backends of a process group, by default of the default group, by type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a process group, by default of the default group; (0,) without torch.distributed."""
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def checked_group(group: object) -> dist.ProcessGroup | None:
    """The argument `process_group`. Raises ValueError for another object, and on a rank outside of the group."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this rank is not in the group; build the optimizer on the group's ranks alone")
    raise ValueError(
        f"process_group = {group!r} is not accepted; pass a group from torch.distributed.new_group, or of a mesh "
        "(mesh.get_group())"
    )


def group_count() -> int:
    """Process groups with this rank. PyTorch hashes this number into the name of a group of some ranks."""
    return len(dist.distributed_c10d._world.pg_names)


def group_name(group: dist.ProcessGroup | None) -> str | None:
    """PyTorch's name of a process group; None for None."""
    return None if group is None else group.group_name


def group_named(name: Any) -> dist.ProcessGroup | None:
    """The process group with this `group_name`; None for None. Raises ValueError if this process has no such group."""
    if name is None:
        return None
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"process_group: this process has no group {name!r}, with which the optimizer was pickled; build a new "
            "optimizer, and load the state dict of the old one"
        ) from error


def fast_options(device: str, timeout: timedelta | None, group: dist.ProcessGroup | None = None) -> Any | None:
    """Options for a new group like `group` with high-priority kernels; None without NCCL on the device."""
    # torch 2.15 has several backends of NCCL, with these options.
    if not backends(group).get(device, "").startswith("nccl"):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        # Without the same value in the options, new_group warns.
        options._timeout = timeout
    return options


def check_node(size: int, rank: int) -> None:
    """Raise ValueError if this rank has another place in its node, by torchrun, than with nodes of `size` (0: any)."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not size or not dist.is_initialized() or any(name not in os.environ for name in names):
        return
    place = rank % size
    planned = place, min(size, dist.get_world_size() - rank + place)
    if planned != (here := tuple(int(os.environ[name]) for name in names)):
        raise ValueError(
            f"the exchange goes by nodes of {size} ranks, where rank {rank} is number {planned[0]} of {planned[1]}; "
            f"torchrun started it as number {here[0]} of {here[1]}: set machine.ranks_per_node to the ranks of a node, "
            "and number ranks node by node"
        )


class MeshWithoutGroups(DeviceMesh):
    """The holders of a tensor; other ranks have an empty local tensor. `refusal`: error message of a collective."""

    refusal: str

    def __init__(self, device_type: str, ranks: Tensor, names: tuple[str, ...] | None = None) -> None:
        # No process groups, because making a group is collective over all ranks.
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False)

    @property
    def _dim_group_names(self) -> Any:  # type: ignore[override]
        # FSDP2 reads this property, and DTensor for every collective.
        raise ValueError(self.refusal)

    # DTensor caches the placement of an operator's result by the mesh, and would take an equal mesh with groups.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((type(self).__name__, super().__hash__()))

    # The method of DeviceMesh looks for process groups.
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def without_groups(tensor: Tensor) -> bool:
    """Whether the mesh of a tensor has no process groups."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, MeshWithoutGroups)


def refuse_reads_outside(tensor: DTensor, message: str) -> None:
    """Make `full_tensor` and `redistribute` raise ValueError outside of the mesh, where both return an empty tensor."""
    if tensor.device_mesh.get_coordinate() is None:
        for read in ("full_tensor", "redistribute"):
            # Not a closure, because the tensor may be pickled.
            setattr(tensor, read, partial(_refuse, message))


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(message)


class StateMesh(MeshWithoutGroups):
    """The keepers of a momentum or of a state of an algorithm, if not every holder is a keeper."""

    refusal = (
        'muon.state = "owner": the momentum is on its owner alone; save and load the momentum with '
        "torch.distributed.checkpoint, which moves data between ranks"
    )

    def __getstate__(self) -> dict[str, Any]:
        warn(
            'a state of muon.state = "owner" was pickled: the pickle has the part of this rank alone. '
            "Save with torch.distributed.checkpoint, on all ranks"
        )
        return super().__getstate__()
