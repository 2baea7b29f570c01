"""One owned parameter: on its owner alone between uses, and on every rank while its module computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..dtensor import layout_of, local
from ..plan import types
from ..plan.layout import Intervals, chunk, region
from .private import OwnerMesh, joint_mesh, stored_tensor

# [Note: owned tensors]
# - Original parameter: the one on the module when `own` is called, a plain tensor or a DTensor of tensor parallelism.
# - Owned parameter: the original one on its owner, a DTensor with all other ranks as non-participants. It is on the
#   module between uses; optimizers and checkpoints see no other. Its mesh has the replicas of HSDP, if each has an
#   owner; then the axes of tensor or expert parallelism, whose pieces stay where they are; and a last axis, `owner`, of
#   one rank. A stack of experts may have several owners there, who divide it along dim 0. The axis is the last because
#   DTensor cuts a dim from left to right, and it is what expert parallelism has left to a rank that they divide.
# - Owned part: what one owner has of a parameter, all of it or some of its experts.
# - Unsharded buffer: flat, one for each param group, in the dtype of computing. Parameters of one owner lie in it in
#   the order of owners, so that what each one broadcasts of them is a single run of elements; stacks follow, whose
#   parts are a run each, since a module computes with the stack as it lies there.
# - Unsharded parameter: a view of the buffer, as a DTensor if the original parameter was one. It is on the module while
#   that computes, on every rank; an autograd leaf.
# - Unsharded accumulated gradient: the sum of the unsharded parameter's gradients that are not reduced yet.
# - Reduced gradient: the sum over the data-parallel ranks on the owner, added to the owned parameter's `grad`.

OWNER_AXIS = "owner"
DATA_AXES = ("replicate", "shard")
"""Names of the axes of a data-parallel mesh that has none."""


@dataclass(frozen=True)
class ParamModuleInfo:
    """Where a parameter is: an attribute of a module."""

    module: nn.Module
    param_name: str

    @property
    def param(self) -> nn.Parameter:
        found = self.module._parameters[self.param_name]
        assert found is not None, f"{type(self.module).__name__}: {self.param_name} was removed"
        return found

    def register(self, param: nn.Parameter) -> None:
        # Not setattr, whose checks of every name and kind cost host time in every forward.
        self.module._parameters[self.param_name] = param


class OwnedParam:
    """One owned parameter of a param group; see [Note: owned tensors].

    Args:
        fqn: name in the model, for messages.
        info: place of the original parameter, which the owned one takes at once.
        data_mesh: data-parallel mesh.
        owners: ranks of the mesh's last axis; several divide dim 0.
        offload_to_cpu: whether the owned parameter and its gradient are kept on the host.

    Attributes:
        unsharded_size: size of the unsharded parameter's local tensor.
        parts: what each owner has, in the order of dim 0.
        unsharded_accumulated_grad: sum of gradients in the reduce dtype, or None.
    """

    def __init__(
        self, fqn: str, info: ParamModuleInfo, data_mesh: DeviceMesh, owners: Sequence[int], offload_to_cpu: bool
    ) -> None:
        self.fqn, self._info = fqn, info
        owned = place_on_owners(info.param, data_mesh, owners)
        if offload_to_cpu and not owned.is_meta:
            owned = nn.Parameter(owned.detach().cpu(), requires_grad=owned.requires_grad)
        self.unsharded_size = unsharded_size(owned)
        self.parts = tuple(OwnedPart(self, owner, *rows) for owner, rows in owned_rows(owned))
        self.unsharded_accumulated_grad: Tensor | None = None
        self._owned_param = owned
        self._unsharded_param: nn.Parameter | None = None
        self.to_owned()

    @property
    def owned_param(self) -> nn.Parameter:
        # `to_empty` and the like put another object on the module: from then on that is the owned parameter.
        registered = self._info.param
        return self._owned_param if registered is self._unsharded_param else registered

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The unsharded parameter, once the group was unsharded for the first time."""
        assert self._unsharded_param is not None, f"{self.fqn}: not yet unsharded"
        return self._unsharded_param

    def init_unsharded_param(self, view: Tensor) -> None:
        """Make the unsharded parameter from its view of the unsharded buffer."""
        owned = self.owned_param
        stored = stored_tensor(owned)
        if stored.device != view.device:
            # Only from pinned memory does a copy run beside the host. Not before: `to_empty` takes other memory.
            stored.data = stored.pin_memory()
        self._unsharded_param = nn.Parameter(wrap_unsharded(owned, view), requires_grad=owned.requires_grad)

    def to_unsharded(self) -> None:
        """Have the module compute with the unsharded parameter."""
        self._owned_param = self.owned_param
        # A user freezes the parameter that is seen, the owned one; autograd looks at the other.
        self.unsharded_param.requires_grad_(self._owned_param.requires_grad)
        self._info.register(self.unsharded_param)

    def to_owned(self) -> None:
        self._info.register(self._owned_param)

    def accumulate_unsharded_grad(self, dtype: torch.dtype | None) -> None:
        """Add the gradient of this backward, if there is one, to those not yet reduced; the sum is kept in `dtype`."""
        grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if grad is None:
            return
        if isinstance(grad, DTensor):
            # Backward may leave a partial sum over the tensor-parallel ranks. The owner holds a piece, not a summand.
            placements = self.unsharded_param.placements  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=placements).to_local()
        total = self.unsharded_accumulated_grad
        self.unsharded_accumulated_grad = grad.to(dtype) if total is None else total.add_(grad)

    def take_accumulated_grad(self) -> Tensor | None:
        """The sum of gradients that are not reduced yet, if there is one; there is none afterwards."""
        taken, self.unsharded_accumulated_grad = self.unsharded_accumulated_grad, None
        return taken

    def discard_unsharded_grads(self) -> None:
        """Forget gradients that were not reduced yet, as those of a backward pass that raised."""
        self.unsharded_accumulated_grad = None
        if self._unsharded_param is not None:
            self._unsharded_param.grad = None

    def add_reduced_grad(self, reduced: Tensor) -> None:
        """Give the owned parameter its gradient, or add to the one it has."""
        owned, reduced = self.owned_param, reduced.to(self.owned_param.dtype)
        place = local(owned).device
        if owned.grad is not None:
            # On the local tensor: DTensor refuses to add a plain one.
            local(owned.grad).add_(reduced.to(place))
        elif reduced.device == place:
            owned.grad = owned_like(reduced, owned)
        else:
            # On the host, pinned. `from_local` would take it back to the mesh's device.
            owned.grad = torch.empty_like(owned, pin_memory=True)
            local(owned.grad).copy_(reduced)


@dataclass(frozen=True)
class OwnedPart:
    """What one owner has of an unsharded parameter: rows `start` to `stop` of dim 0."""

    param: OwnedParam
    owner: int
    start: int
    stop: int

    @property
    def size(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.param.unsharded_size[1:]))

    def of(self, unsharded: Tensor) -> Tensor:
        """This part of the unsharded parameter or of its gradient."""
        return unsharded.narrow(0, self.start, self.stop - self.start)


def is_owned(tensor: Tensor) -> bool:
    """Whether a parameter, its gradient or its optimizer state is on an owner alone."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, OwnerMesh)


def holders(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks that have elements of an owned tensor."""
    return tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())


def held_elements(tensor: DTensor) -> dict[int, int]:
    """Elements of an owned tensor that each of its holders has, by global rank."""
    layout = layout_of("", tensor)
    coordinates = map(layout.mesh.coordinate, range(len(layout.mesh.ranks)))
    sizes = (_size_of(region(layout, coordinate)) for coordinate in coordinates)
    return {rank: prod(size) for rank, size in zip(layout.mesh.ranks, sizes, strict=True)}


def unsharded_size(owned: Tensor) -> torch.Size:
    """What a rank computes with of an owned tensor: all of it, or this rank's piece of tensor or expert parallelism."""
    mesh, layout = _mesh_of(owned), layout_of("", owned)
    inner = () if mesh.inner is None else mesh.inner.get_coordinate()
    assert inner is not None, "this rank is on the mesh of its own piece"
    # As if one rank owned it. The axes before the inner ones cut nothing: 0 will do, on a rank too that is not on the
    # owners' mesh.
    whole = replace(layout, placements=(*layout.placements[:-1], types.Replicate()))
    dims = region(whole, (*[0] * (mesh.ndim - 1 - len(inner)), *inner, 0))
    return _size_of(dims)


def owned_rows(owned: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each owner of a tensor, and the rows of dim 0 that it has of this rank's unsharded tensor."""
    owners, rows = _mesh_of(owned).owners, unsharded_size(owned)[0]
    for number, owner in enumerate(owners):
        part = chunk(rows, len(owners), number)
        yield owner, (part.start, part.stop)


def wrap_unsharded(owned: Tensor, piece: Tensor) -> Tensor:
    """A local tensor of `unsharded_size` as the original parameter was: itself, or a DTensor of tensor parallelism."""
    inner = _mesh_of(owned).inner
    if inner is None:
        return piece
    return _from_local(piece, inner, owned.placements[-1 - inner.ndim : -1], owned)  # type: ignore[attr-defined]


def owned_like(piece: Tensor, owned: Tensor) -> DTensor:
    """A local tensor on the holders of `owned`, its gradient for example."""
    return _from_local(piece, _mesh_of(owned), owned.placements, owned)  # type: ignore[attr-defined]


def place_on_owners(param: Tensor, data_mesh: DeviceMesh, owners: Sequence[int]) -> nn.Parameter:
    """The owned parameter of an original one. A single owner keeps the original storage, the others nothing."""
    inner = param.device_mesh if isinstance(param, DTensor) else None
    placements = param.placements if isinstance(param, DTensor) else ()
    mesh = owner_mesh(data_mesh, inner, owners)
    piece, coordinate = local(param.detach()), mesh.get_coordinate()
    if coordinate is None:
        # Global size and stride stay those of the whole: checkpoints and state dicts compare them on every rank.
        piece = piece.new_empty(0)
    elif len(owners) > 1:
        part = chunk(len(piece), len(owners), coordinate[-1])
        # A copy: a view would keep the whole stack in memory.
        piece = piece[part.start : part.stop].clone()
    outer = [Replicate()] * (mesh.ndim - 1 - len(placements))
    owned = _from_local(piece, mesh, [*outer, *placements, Shard(0) if len(owners) > 1 else Replicate()], param)
    return nn.Parameter(owned, requires_grad=param.requires_grad)


def owner_mesh(data_mesh: DeviceMesh, inner: DeviceMesh | None, owners: Sequence[int]) -> OwnerMesh:
    """The mesh of a parameter that ranks `owners` of the last axis of `data_mesh` own.

    Args:
        data_mesh: data-parallel mesh, (shard,) or (replicate, shard).
        inner: mesh of the original parameter (tensor or expert parallelism), a slice of the same mesh as `data_mesh`,
            or None.
        owners: ranks of the last axis, in the order in which they divide dim 0.
    """
    joint = data_mesh if inner is None else joint_mesh(data_mesh, inner)
    data_names = data_mesh.mesh_dim_names or DATA_AXES[-data_mesh.ndim :]
    names = (*data_names[:-1], *(() if inner is None else inner.mesh_dim_names or ()), OWNER_AXIS)
    ranks = torch.stack([joint.mesh.select(data_mesh.ndim - 1, owner) for owner in owners], dim=-1)
    return OwnerMesh(ranks, names, data_mesh, tuple(owners), inner)


def _mesh_of(owned: Tensor) -> OwnerMesh:
    assert isinstance(owned, DTensor), "an owned parameter is a DTensor"
    assert isinstance(owned.device_mesh, OwnerMesh), "an owned parameter is on an owner's mesh"
    return owned.device_mesh


def _size_of(dims: Sequence[Intervals]) -> torch.Size:
    return torch.Size(sum(stop - start for start, stop in dim) for dim in dims)


def _from_local(piece: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    # With shape and stride, and unchecked: to find them out, or to check, DTensor would communicate.
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
