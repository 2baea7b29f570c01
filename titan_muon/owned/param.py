"""Owned parameters."""

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
from ..tensors.dtensor import from_local, layout_of, layout_on, local
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
        return torch.Size(sum(stop - start for start, stop in dim) for dim in self._region(shape, coordinate))

    def piece(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """A rank's piece, for a mesh of a single axis with `Shard`."""
        runs = [[*dim, (0, 0)][0] for dim in self._region(shape, (rank,))]
        return tuple(slice(start, stop) for start, stop in runs)

    def wrap(self, piece: Tensor, like: Tensor) -> Tensor:
        return piece if self.mesh is None else from_local(piece, self.mesh, self.placements, like)

    def _region(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Intervals, ...]:
        assert self.mesh is not None, "a plain tensor has no pieces"
        return region(layout_on("", shape, self.mesh, self.placements), coordinate)


# [Note: owned tensors]
# - Original parameter: on the module before `own`, a plain tensor or a DTensor of tensor parallelism.
# - Owned parameter: on the owner, as a DTensor with all further ranks as non-participants. On the module between uses,
#   and the only parameter for optimizers and checkpoints. Axes of its mesh: the replicas of HSDP, if each has an owner;
#   the axes of tensor or expert parallelism, with unchanged pieces; and `owner`, of size 1, or larger for a stack of
#   experts whose owners divide dim 0. `owner` is last because DTensor cuts a dim from left to right, and the owners
#   divide the local experts of expert parallelism.
# - Holder: with `tp_pieces = "whole"`, the tensor-parallel rank of an owner with all pieces. The owned parameter
#   has no mesh axis of tensor parallelism. In a pass the holder sends each peer its piece, and the peer then acts as an
#   owner of the piece.
# - Owned part: an owner's share of a parameter, all of it or some of its experts.
# - Unsharded buffer: flat, one per param group, in the compute dtype. Parameters with a single owner come first, sorted
#   by owner, so that each owner broadcasts a single run of elements. Stacks follow with a run per part.
# - Unsharded parameter: a view of the buffer, wrapped as a DTensor if the original was a DTensor. An autograd leaf, on
#   the module of every rank during compute.
# - Unsharded accumulated gradient: the sum before reduction.
# - Reduced gradient: the sum over data-parallel ranks, on the owner, added to the owned parameter's `grad`.

OWNER_AXIS = "owner"
HOLDER_AXIS = "holder"
"""Replaces OWNER_AXIS for a holder, because DTensor treats meshes of equal ranks and names as equal."""
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

    `owners`: ranks of the mesh's last axis. `holders`: tensor-parallel rank of each owner's holder, or None. `parts`:
    by owner, in the order of dim 0. `unsharded_accumulated_grad`: in the reduce dtype.
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
        self.fqn, self._info, self.inner = fqn, info, OriginalPlacement.of(info.param)
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
    """An owner's rows `start` to `stop` of an unsharded parameter.

    `holder`: tensor-parallel rank with all pieces, or None.
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
        return unsharded.narrow(0, self.start, self.stop - self.start)

    def piece(self, rank: int) -> tuple[slice, ...]:
        """A tensor-parallel rank's piece within the holder's tensor."""
        return self.param.inner.piece(self.param.owned_param.shape, rank)

    def stored(self, rank: int) -> Tensor:
        stored = local(self.param.owned_param)
        return stored if self.holder is None else stored[self.piece(rank)]


def is_owned(tensor: Tensor) -> bool:
    """Whether a parameter, gradient or state is stored only on owners."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, OwnerMesh)


def holders(tensor: DTensor) -> tuple[int, ...]:
    """Global ranks with elements of an owned tensor."""
    return tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())


def peer_elements(tensor: DTensor) -> dict[int, int]:
    """Elements that each holder sends to tensor-parallel peers in a pass, by global rank."""
    mesh = tensor.device_mesh
    if not isinstance(mesh, OwnerMesh) or mesh.holders is None or mesh.inner is None:
        return {}
    peers = mesh.inner.size() - 1
    return {rank: held * peers // (peers + 1) for rank, held in held_elements(tensor).items()}


def held_elements(tensor: DTensor) -> dict[int, int]:
    """Elements of an owned tensor, by global rank."""
    layout = layout_of("", tensor)
    regions = {rank: region(layout, coordinate) for rank, coordinate in layout.mesh.coordinates.items()}
    return {rank: prod(sum(stop - start for start, stop in dim) for dim in dims) for rank, dims in regions.items()}


def owned_like(piece: Tensor, owned: Tensor) -> DTensor:
    """A DTensor with the placement of `owned` from a local tensor."""
    assert isinstance(owned, DTensor), "an owned parameter is a DTensor"
    return from_local(piece, owned.device_mesh, owned.placements, owned)


def place_on_owners(
    param: Tensor, data_mesh: DeviceMesh, owners: Sequence[int], holders: Sequence[int] | None = None
) -> nn.Parameter:
    """The owned parameter of an original parameter. A single owner keeps the original storage.

    With holders, collective over the tensor-parallel ranks.
    """
    inner = OriginalPlacement.of(param)
    mesh = owner_mesh(data_mesh, inner.mesh, owners, holders)
    placements = inner.placements if holders is None else ()
    piece, coordinate = local(param.detach()) if holders is None else _whole(param), mesh.get_coordinate()
    if coordinate is None:
        # Global size and stride on every rank, because checkpoints and state dicts compare these.
        piece = piece.new_empty(0)
    elif len(owners) > 1:
        part = chunk(len(piece), len(owners), coordinate[-1])
        # Clone, because a view would keep the whole stack in memory.
        piece = piece[part.start : part.stop].clone()
    outer = [Replicate()] * (mesh.ndim - 1 - len(placements))
    owned = from_local(piece, mesh, [*outer, *placements, Shard(0) if len(owners) > 1 else Replicate()], param)
    return nn.Parameter(owned, requires_grad=param.requires_grad)


def _whole(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor), "only cut parameters have holders"
    # The holder fills the parameter later.
    if param.is_meta:
        return torch.empty(param.shape, dtype=param.dtype, device="meta")
    return DTensor.full_tensor(param.detach())  # type: ignore[arg-type]


def owner_mesh(
    data_mesh: DeviceMesh, inner: DeviceMesh | None, owners: Sequence[int], holders: Sequence[int] | None = None
) -> OwnerMesh:
    """The mesh of a parameter; arguments as in `OwnerMesh`. `inner` is a slice of the same root mesh."""
    joint = data_mesh if inner is None else joint_mesh(data_mesh, inner)
    data_names = data_mesh.mesh_dim_names or DATA_AXES[-data_mesh.ndim :]
    names = (*data_names[:-1], *(() if inner is None else inner.mesh_dim_names or ()), OWNER_AXIS)
    ranks = [joint.mesh.select(data_mesh.ndim - 1, owner) for owner in owners]
    if holders is None:
        return OwnerMesh(torch.stack(ranks, dim=-1), names, data_mesh, tuple(owners), inner)
    held = torch.stack([at.select(-1, holder) for at, holder in zip(ranks, holders, strict=True)], dim=-1)
    return OwnerMesh(held, (*data_names[:-1], HOLDER_AXIS), data_mesh, tuple(owners), inner, tuple(holders))
