"""Owned parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..engine.layout.intervals import chunk, region, regions
from ..engine.tensors.dtensor import from_local, layout_of, layout_on, local
from . import private
from .private import OwnerMesh, joint_mesh


@dataclass(frozen=True)
class OriginalPlacement:
    """Mesh and placements of a parameter before `own`; empty for a plain tensor."""

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, original: Tensor) -> OriginalPlacement:
        return cls(original.device_mesh, tuple(original.placements)) if isinstance(original, DTensor) else cls()

    def size(self, shape: Sequence[int]) -> torch.Size:
        if self.mesh is None:
            return torch.Size(shape)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "this rank is on the parameter's mesh"
        held = region(layout_on("", shape, self.mesh, self.placements), coordinate)
        return torch.Size(sum(stop - start for start, stop in dim) for dim in held)

    def wrap(self, piece: Tensor, like: Tensor) -> Tensor:
        return piece if self.mesh is None else from_local(piece, self.mesh, self.placements, like)


# [Note: owned tensors]
# - Original parameter: on the module before `own`, a plain tensor or a DTensor of tensor parallelism.
# - Owned parameter: on the owner, as a DTensor with all other ranks as non-participants. On the module between uses,
#   and the only parameter for optimizers and checkpoints. Axes of its mesh: the replicas of HSDP, if each has an owner;
#   the axes of tensor or expert parallelism, with unchanged pieces; and `owner`, of size 1, or larger for a stack of
#   experts whose owners divide dim 0. `owner` is last because DTensor cuts a dim from left to right, and the owners
#   divide the local experts of expert parallelism.
# - Owned part: an owner's share of a parameter, all of it or some of its experts.
# - Unsharded buffer: flat, one per param group, in the compute dtype. Parameters with a single owner come first, sorted
#   by owner, so that each owner broadcasts a single run of elements. Stacks follow with a run per part.
# - Unsharded parameter: a view of the buffer, wrapped as a DTensor if the original was a DTensor. An autograd leaf, on
#   the module of every rank during compute.
# - Unsharded accumulated gradient: the sum before reduction.
# - Reduced gradient: the sum over data-parallel ranks, on the owner, added to the owned parameter's `grad`.

OWNER_AXIS = "owner"
DATA_AXES = ("replicate", "shard")
"""Default axis names."""


@dataclass(frozen=True)
class ParamModuleInfo:
    """Location of a parameter."""

    module: nn.Module
    param_name: str

    @property
    def param(self) -> nn.Parameter:
        param = self.module._parameters[self.param_name]
        assert param is not None, f"{type(self.module).__name__}: {self.param_name} was removed"
        return param

    def register(self, param: nn.Parameter) -> None:
        # Not setattr, whose checks cost host time in every forward.
        self.module._parameters[self.param_name] = param


class OwnedParam:
    """See [Note: owned tensors]. The constructor registers the owned parameter on the module.

    `owners`: ranks of the mesh's last axis. `parts`: by owner, in the order of dim 0. `unsharded_accumulated_grad`: in
    the reduce dtype.
    """

    def __init__(
        self,
        fqn: str,
        info: ParamModuleInfo,
        data_mesh: DeviceMesh,
        owners: Sequence[int],
        offload_to_cpu: bool,
    ) -> None:
        self.fqn, self._info, self.inner = fqn, info, OriginalPlacement.of(info.param)
        owned = place_on_owners(info.param, data_mesh, owners)
        if offload_to_cpu and not owned.is_meta:
            owned = nn.Parameter(owned.detach().cpu(), requires_grad=owned.requires_grad)
        self.unsharded_size = self.inner.size(owned.shape)
        self.parts = tuple(
            OwnedPart(self, owner, *chunk(self.unsharded_size[0], len(owners), number))
            for number, owner in enumerate(owners)
        )
        self.unsharded_accumulated_grad: Tensor | None = None
        self._owned_param = owned
        self._unsharded_param: nn.Parameter | None = None
        self.to_owned()

    @property
    def owned_param(self) -> nn.Parameter:
        # `to_empty` and similar methods register a new parameter.
        registered = self._info.param
        return self._owned_param if registered is self._unsharded_param else registered

    @property
    def unsharded_param(self) -> nn.Parameter:
        assert self._unsharded_param is not None, f"{self.fqn}: not yet unsharded"
        return self._unsharded_param

    def init_unsharded_param(self, view: Tensor) -> None:
        owned = self.owned_param
        stored = local(owned)
        if stored.device != view.device:
            # Copies are asynchronous only from pinned memory. Pin late, because `to_empty` replaces memory.
            stored.data = stored.pin_memory()
        self._unsharded_param = nn.Parameter(self.inner.wrap(view, owned), requires_grad=owned.requires_grad)

    def to_unsharded(self) -> None:
        self._owned_param = self.owned_param
        # Users freeze the visible, owned parameter, but autograd reads the unsharded parameter.
        self.unsharded_param.requires_grad_(self._owned_param.requires_grad)
        self._info.register(self.unsharded_param)

    def to_owned(self) -> None:
        self._info.register(self._owned_param)

    def accumulate_unsharded_grad(self, dtype: torch.dtype | None) -> None:
        """Add the gradient of this backward, if any, in `dtype`."""
        grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if grad is None:
            return
        if isinstance(grad, DTensor):
            # Backward may leave a partial sum over tensor-parallel ranks.
            placements = self.unsharded_param.placements  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=placements).to_local()
        total = self.unsharded_accumulated_grad
        self.unsharded_accumulated_grad = grad.to(dtype) if total is None else total.add_(grad)

    def take_accumulated_grad(self) -> Tensor | None:
        grad, self.unsharded_accumulated_grad = self.unsharded_accumulated_grad, None
        return grad

    def discard_unsharded_grads(self) -> None:
        self.unsharded_accumulated_grad = None
        if self._unsharded_param is not None:
            self._unsharded_param.grad = None

    def add_reduced_grad(self, reduced: Tensor) -> None:
        owned, reduced = self.owned_param, reduced.to(self.owned_param.dtype)
        place = local(owned).device
        if owned.grad is not None:
            # DTensor refuses to add a plain tensor.
            local(owned.grad).add_(reduced.to(place))
        elif reduced.device == place:
            owned.grad = owned_like(reduced, owned)
        else:
            # `from_local` would move the gradient to the mesh's device.
            owned.grad = torch.empty_like(owned, pin_memory=True)
            local(owned.grad).copy_(reduced)
        # Autograd never sees an owned parameter. Early gathers wait for these hooks.
        for hook in private.gradient_hooks(owned):
            hook(owned)


@dataclass(frozen=True)
class OwnedPart:
    """An owner's rows `start` to `stop` of an unsharded parameter."""

    param: OwnedParam
    owner: int
    start: int
    stop: int

    @property
    def size(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.param.unsharded_size[1:]))

    def of(self, unsharded: Tensor) -> Tensor:
        return unsharded.narrow(0, self.start, self.stop - self.start)


def is_owned(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter, gradient or state is stored only on owners."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, OwnerMesh)


def holders(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks with elements of an owned tensor."""
    return tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())


def held_elements(tensor: DTensor) -> dict[int, int]:
    """Elements of an owned tensor, by global rank."""
    held = regions(layout_of("", tensor))
    return {rank: prod(sum(stop - start for start, stop in dim) for dim in dims) for rank, dims in held.items()}


def owned_like(piece: Tensor, owned: Tensor) -> DTensor:
    """A DTensor with the placement of `owned` from a local tensor."""
    assert isinstance(owned, DTensor), "an owned parameter is a DTensor"
    return from_local(piece, owned.device_mesh, owned.placements, owned)


def place_on_owners(param: Tensor, data_mesh: DeviceMesh, owners: Sequence[int]) -> nn.Parameter:
    """The owned parameter of an original parameter. A single owner keeps the original storage."""
    inner = OriginalPlacement.of(param)
    mesh = owner_mesh(data_mesh, inner.mesh, owners)
    piece, coordinate = local(param.detach()), mesh.get_coordinate()
    if coordinate is None:
        # Global size and stride on every rank, because checkpoints and state dicts compare these.
        piece = piece.new_empty(0)
    elif len(owners) > 1:
        part = chunk(len(piece), len(owners), coordinate[-1])
        # Clone, because a view would keep the whole stack in memory.
        piece = piece[part.start : part.stop].clone()
    outer = [Replicate()] * (mesh.ndim - 1 - len(inner.placements))
    last = Shard(0) if len(owners) > 1 else Replicate()
    owned = from_local(piece, mesh, [*outer, *inner.placements, last], param)
    return nn.Parameter(owned, requires_grad=param.requires_grad)


def owner_mesh(data_mesh: DeviceMesh, inner: DeviceMesh | None, owners: Sequence[int]) -> OwnerMesh:
    """The mesh of a parameter; arguments as in `OwnerMesh`. `inner` is a slice of the same root mesh."""
    joint = data_mesh if inner is None else joint_mesh(data_mesh, inner)
    data_names = data_mesh.mesh_dim_names or DATA_AXES[-data_mesh.ndim :]
    names = (*data_names[:-1], *(() if inner is None else inner.mesh_dim_names or ()), OWNER_AXIS)
    ranks = torch.stack([joint.mesh.select(data_mesh.ndim - 1, owner) for owner in owners], dim=-1)
    return OwnerMesh(ranks, names, data_mesh, tuple(owners), inner)
