"""One owned parameter: on its owner alone between uses, and on every rank while its module computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..plan.terms.layout import Intervals, chunk, region
from ..tensors.dtensor import layout_of, layout_on, local
from . import private
from .private import OwnerMesh, joint_mesh, stored_tensor


@dataclass(frozen=True)
class Inner:
    """The mesh and the placements of a parameter before it was owned; none of a plain tensor.

    Attributes:
        mesh: mesh of tensor or expert parallelism, or None.
        placements: one for each axis of the mesh.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, original: Tensor) -> Inner:
        """What cuts a parameter that is not owned yet."""
        return cls(original.device_mesh, tuple(original.placements)) if isinstance(original, DTensor) else cls()

    def size(self, shape: Sequence[int]) -> torch.Size:
        """What this rank computes with of a parameter of some shape."""
        if self.mesh is None:
            return torch.Size(shape)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "this rank is on the mesh of its own piece"
        return torch.Size(sum(stop - start for start, stop in dim) for dim in self._region(shape, coordinate))

    def piece(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """Where in the whole the piece of a rank is, on a mesh of one axis that `Shard` cuts for."""
        runs = [[*dim, (0, 0)][0] for dim in self._region(shape, (rank,))]
        return tuple(slice(start, stop) for start, stop in runs)

    def wrap(self, piece: Tensor, like: Tensor) -> Tensor:
        """This rank's piece as the original parameter was: itself, or a DTensor."""
        return piece if self.mesh is None else from_local(piece, self.mesh, self.placements, like)

    def _region(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Intervals, ...]:
        assert self.mesh is not None, "a plain tensor has no pieces"
        return region(layout_on("", shape, self.mesh, self.placements), coordinate)


def from_local(piece: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    """A DTensor of the shape of `like`, of which this rank has a piece."""
    # With shape and stride, and unchecked: to find them out, or to check, DTensor would communicate.
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


# [Note: owned tensors]
# - Original parameter: the one on the module when `own` is called, a plain tensor or a DTensor of tensor parallelism.
# - Owned parameter: the original one on its owner, a DTensor with all other ranks as non-participants. It is on the
#   module between uses; optimizers and checkpoints see no other. Its mesh has the replicas of HSDP, if each has an
#   owner; then the axes of tensor or expert parallelism, whose pieces stay where they are; and a last axis, `owner`, of
#   one rank. A stack of experts may have several owners there, who divide it along dim 0. The axis is the last because
#   DTensor cuts a dim from left to right, and it is what expert parallelism has left to a rank that they divide.
# - Holder: with `tensor_parallel = "whole"` the one of an owner's tensor-parallel ranks that has all pieces. The owned
#   parameter is whole there, and its mesh has no axis of tensor parallelism; in a pass the holder gives each of the
#   others its piece, which is an owner of it from then on.
# - Owned part: what one owner has of a parameter, all of it or some of its experts.
# - Unsharded buffer: flat, one for each param group, in the dtype of computing. Parameters of one owner lie in it in
#   the order of owners, so that what each one broadcasts of them is a single run of elements; stacks follow, whose
#   parts are a run each, since a module computes with the stack as it lies there.
# - Unsharded parameter: a view of the buffer, as a DTensor if the original parameter was one. It is on the module while
#   that computes, on every rank; an autograd leaf.
# - Unsharded accumulated gradient: the sum of the unsharded parameter's gradients that are not reduced yet.
# - Reduced gradient: the sum over the data-parallel ranks on the owner, added to the owned parameter's `grad`.

OWNER_AXIS = "owner"
HOLDER_AXIS = "holder"
"""Instead of it where a holder has all pieces: meshes of equal ranks and names are one to DTensor."""
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
        holders: the holder of each of them, a rank of tensor parallelism, or None if each rank keeps its piece.
        offload_to_cpu: whether the owned parameter and its gradient are kept on the host.

    Attributes:
        inner: how ranks of tensor or expert parallelism cut the unsharded parameter.
        unsharded_size: size of the unsharded parameter's local tensor.
        parts: what each owner has, in the order of dim 0.
        unsharded_accumulated_grad: sum of gradients in the reduce dtype, or None.
    """

    def __init__(
        self,
        fqn: str,
        info: ParamModuleInfo,
        data_mesh: DeviceMesh,
        owners: Sequence[int],
        holders: Sequence[int] | None,
        offload_to_cpu: bool,
    ) -> None:
        self.fqn, self._info, self.inner = fqn, info, Inner.of(info.param)
        owned = place_on_owners(info.param, data_mesh, owners, holders)
        if offload_to_cpu and not owned.is_meta:
            owned = nn.Parameter(owned.detach().cpu(), requires_grad=owned.requires_grad)
        self.unsharded_size = self.inner.size(owned.shape)
        self.parts = tuple(
            OwnedPart(
                self,
                owner,
                *chunk(self.unsharded_size[0], len(owners), number),
                None if holders is None else holders[number],
            )
            for number, owner in enumerate(owners)
        )
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
        self._unsharded_param = nn.Parameter(self.inner.wrap(view, owned), requires_grad=owned.requires_grad)

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
        """Give the owned parameter its gradient, or add to the one it has, and call what waits for it."""
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
        # Autograd never sees an owned parameter. FSDP2 calls the hooks of sharded ones here too; what waits for them to
        # begin its work, such as gathers in backward, would otherwise wait for ever.
        for hook in private.gradient_hooks(owned):
            hook(owned)


@dataclass(frozen=True)
class OwnedPart:
    """What one owner has of an unsharded parameter: rows `start` to `stop` of dim 0.

    `holder` is the rank of tensor parallelism that has it of all pieces, or None if each has it of its own.
    """

    param: OwnedParam
    owner: int
    start: int
    stop: int
    holder: int | None

    @property
    def size(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.param.unsharded_size[1:]))

    def of(self, unsharded: Tensor) -> Tensor:
        """This part of the unsharded parameter or of its gradient."""
        return unsharded.narrow(0, self.start, self.stop - self.start)

    def piece(self, rank: int) -> tuple[slice, ...]:
        """Where in what its holder has the piece of a rank of tensor parallelism is."""
        # Of a stack that several owners divide each has fewer rows; tensor parallelism does not cut those.
        return self.param.inner.piece(self.param.owned_param.shape, rank)

    def stored(self, rank: int) -> Tensor:
        """What a rank of tensor parallelism computes with, where this part is stored."""
        here = local(self.param.owned_param)
        return here if self.holder is None else here[self.piece(rank)]


def is_owned(tensor: Tensor) -> bool:
    """Whether a parameter, its gradient or its optimizer state is on an owner alone."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, OwnerMesh)


def holders(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks that have elements of an owned tensor."""
    return tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())


def peer_elements(tensor: DTensor) -> dict[int, int]:
    """Elements that each holder of all pieces sends its tensor-parallel peers in a pass, by global rank."""
    mesh = tensor.device_mesh
    if not isinstance(mesh, OwnerMesh) or mesh.holders is None or mesh.inner is None:
        return {}
    others = mesh.inner.size() - 1
    return {rank: held * others // (others + 1) for rank, held in held_elements(tensor).items()}


def held_elements(tensor: DTensor) -> dict[int, int]:
    """Elements of an owned tensor that each of its holders has, by global rank."""
    layout = layout_of("", tensor)
    regions = (region(layout, layout.mesh.coordinate(place)) for place in range(len(layout.mesh.ranks)))
    sizes = (prod(sum(stop - start for start, stop in dim) for dim in dims) for dims in regions)
    return dict(zip(layout.mesh.ranks, sizes, strict=True))


def owned_like(piece: Tensor, owned: Tensor) -> DTensor:
    """A local tensor on the holders of `owned`, its gradient for example."""
    assert isinstance(owned, DTensor), "an owned parameter is a DTensor"
    return from_local(piece, owned.device_mesh, owned.placements, owned)


def place_on_owners(
    param: Tensor, data_mesh: DeviceMesh, owners: Sequence[int], holders: Sequence[int] | None = None
) -> nn.Parameter:
    """The owned parameter of an original one. A single owner keeps the original storage, the others nothing.

    With holders, those have all pieces: the tensor-parallel ranks send them to each other, once.
    """
    inner = Inner.of(param)
    mesh = owner_mesh(data_mesh, inner.mesh, owners, holders)
    placements = inner.placements if holders is None else ()
    piece, coordinate = local(param.detach()) if holders is None else _whole(param), mesh.get_coordinate()
    if coordinate is None:
        # Global size and stride stay those of the whole: checkpoints and state dicts compare them on every rank.
        piece = piece.new_empty(0)
    elif len(owners) > 1:
        part = chunk(len(piece), len(owners), coordinate[-1])
        # A copy: a view would keep the whole stack in memory.
        piece = piece[part.start : part.stop].clone()
    outer = [Replicate()] * (mesh.ndim - 1 - len(placements))
    owned = from_local(piece, mesh, [*outer, *placements, Shard(0) if len(owners) > 1 else Replicate()], param)
    return nn.Parameter(owned, requires_grad=param.requires_grad)


def _whole(param: Tensor) -> Tensor:
    """All pieces of a parameter that tensor parallelism has cut."""
    assert isinstance(param, DTensor), "only what is cut has holders"
    # Nothing is sent for what has no storage yet: it is filled by its holder later.
    if param.is_meta:
        return torch.empty(param.shape, dtype=param.dtype, device="meta")
    return DTensor.full_tensor(param.detach())  # type: ignore[arg-type]


def owner_mesh(
    data_mesh: DeviceMesh, inner: DeviceMesh | None, owners: Sequence[int], holders: Sequence[int] | None = None
) -> OwnerMesh:
    """The mesh of a parameter that ranks `owners` of the last axis of `data_mesh` own.

    Args:
        data_mesh: data-parallel mesh, (shard,) or (replicate, shard).
        inner: mesh of the original parameter (tensor or expert parallelism), a slice of the same mesh as `data_mesh`,
            or None.
        owners: ranks of the last axis, in the order in which they divide dim 0.
        holders: for each of them the rank of `inner`, a mesh of one axis, that has all pieces; None: each its own.
    """
    joint = data_mesh if inner is None else joint_mesh(data_mesh, inner)
    data_names = data_mesh.mesh_dim_names or DATA_AXES[-data_mesh.ndim :]
    names = (*data_names[:-1], *(() if inner is None else inner.mesh_dim_names or ()), OWNER_AXIS)
    ranks = [joint.mesh.select(data_mesh.ndim - 1, owner) for owner in owners]
    if holders is None:
        return OwnerMesh(torch.stack(ranks, dim=-1), names, data_mesh, tuple(owners), inner)
    held = torch.stack([line.select(-1, holder) for line, holder in zip(ranks, holders, strict=True)], dim=-1)
    return OwnerMesh(held, (*data_names[:-1], HOLDER_AXIS), data_mesh, tuple(owners), inner, tuple(holders))
