"""The owned parameters of one module: gathered from their owners into one flat buffer, used, and freed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ..dtensor import local
from ..exchange import Collectives
from . import private
from .param import placed_like


@dataclass(frozen=True)
class Group:
    """The data-parallel ranks that share a model.

    Attributes:
        mesh: (shard,) or (replicate, shard).
        shard: the process group whose ranks own the parameters.
        replicate: the process group of this rank's copies of an owner, or None.
        rank: this rank's place in `shard`.
        size: of `shard`.
        total: ranks of the whole mesh.
    """

    mesh: DeviceMesh
    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    rank: int
    size: int
    total: int


@dataclass(frozen=True)
class Face:
    """What an unsharded parameter is on every rank: the shape of its local tensor, and its DTensor of TP, if any."""

    shape: torch.Size
    mesh: DeviceMesh | None
    placements: Sequence[Placement]
    whole_shape: torch.Size
    whole_stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Face:
        """The face of a parameter before it is owned."""
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return cls(local(parameter).shape, mesh, placements, parameter.shape, parameter.stride())

    def wrap(self, view: Tensor) -> Tensor:
        """The unsharded parameter whose local elements are `view`."""
        if self.mesh is None:
            return view
        return DTensor.from_local(
            view, self.mesh, self.placements, run_check=False, shape=self.whole_shape, stride=self.whole_stride
        )


class OwnedParameter:
    """One owned parameter: `rest` between uses, and while its module computes `full`, which every rank has.

    Attributes:
        owner: a rank of the shard group.
        full: a view of the unit's buffer; None before the first use.
        unreduced: the sum of gradients that were not yet reduced, or None.
    """

    def __init__(self, fqn: str, module: nn.Module, name: str, owner: int, rest: nn.Parameter, face: Face) -> None:
        self.fqn, self.owner, self.face = fqn, owner, face
        self._module, self._name, self._rest = module, name, rest
        self.full: nn.Parameter | None = None
        self.unreduced: Tensor | None = None
        self.show_rest()

    @property
    def rest(self) -> nn.Parameter:
        """The parameter at rest; `to_empty` and the like replace it by another object."""
        registered = self._module._parameters[self._name]
        assert registered is not None, f"{self.fqn}: removed from its module"
        return self._rest if registered is self.full else registered

    @property
    def used(self) -> nn.Parameter:
        """The unsharded parameter, once it exists."""
        assert self.full is not None, f"{self.fqn}: not yet unsharded"
        return self.full

    def show_full(self) -> None:
        """Let the module compute with the unsharded parameter."""
        self._rest = self.rest
        self.used.requires_grad_(self._rest.requires_grad)
        self._module._parameters[self._name] = self.full

    def show_rest(self) -> None:
        """Let the module have the parameter at rest."""
        self._module._parameters[self._name] = self._rest

    def take_gradient(self, dtype: torch.dtype | None) -> None:
        """Add the gradient of the unsharded parameter, if there is one, to what is not yet reduced.

        The sum is kept in `dtype`, or in the gradient's own.
        """
        grad, self.used.grad = self.used.grad, None
        if grad is None:
            return
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=self.face.placements).to_local()
        self.unreduced = grad.to(dtype) if self.unreduced is None else self.unreduced.add_(grad)

    def add_reduced(self, gradient: Tensor) -> None:
        """Give the parameter at rest its gradient, or add to the one it has."""
        rest = self.rest
        gradient = gradient.to(device=local(rest).device, dtype=rest.dtype)
        if rest.grad is None:
            assert isinstance(rest, DTensor), f"{self.fqn}: no longer at rest on its owner"
            rest.grad = placed_like(gradient, rest)
        else:
            local(rest.grad).add_(gradient)


class State(Enum):
    """Where the elements of a unit are."""

    RESTING = "on the owners"
    COMING = "on their way to all ranks"
    UNSHARDED = "on all ranks"


class Unit:
    """Owned parameters that are gathered and freed together.

    Args:
        name: of the module, for messages.
        parameters: what it owns, in any order.
        group: the ranks that share them.
        collectives: what moves them.
        param_dtype: of the unsharded parameters, or None for their own dtype.
        device: where they are used.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[OwnedParameter],
        group: Group,
        collectives: Collectives,
        param_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.name = name
        self.parameters = tuple(sorted(parameters, key=lambda p: p.owner))
        self.state = State.RESTING
        self._group, self._collectives = group, collectives
        self._dtype, self._device = param_dtype, device
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._works: list[dist.Work] = []
        self._unchanged: AbstractContextManager[None] = nullcontext()
        self._versions: list[int] = []

    @property
    def mine(self) -> list[OwnedParameter]:
        """What this rank owns."""
        return [p for p in self.parameters if p.owner == self._group.rank]

    @property
    def live_bytes(self) -> int:
        """Bytes that the unsharded parameters take now."""
        return 0 if self._flat is None else self._flat.untyped_storage().nbytes()

    def splits(self, parameters: Sequence[OwnedParameter]) -> list[int]:
        """Elements of each rank among some of the parameters, which lie in a buffer in the order of their owners."""
        sizes = [0] * self._group.size
        for parameter in parameters:
            sizes[parameter.owner] += parameter.face.shape.numel()
        return sizes

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start gathering, unless that was done."""
        if self.state is not State.RESTING:
            return
        flat = self._buffer()
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        splits = self.splits(self.parameters)
        start = sum(splits[: self._group.rank])
        self._unchanged = private.unchanged_version(flat)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.owner == self._group.rank:
                view.copy_(local(parameter.rest), non_blocking=True)
        sent = flat[start : start + splits[self._group.rank]]
        self._works = self._collectives.all_gather(flat, splits, sent, self._group.shard)
        self._versions = self._rest_versions()
        self.state = State.COMING

    def unshard(self) -> None:
        """Have every rank compute with the whole parameters. Raises RuntimeError if they changed since they came."""
        self.prefetch()
        if self._versions != self._rest_versions():
            raise RuntimeError(
                f"{self.name}: owned parameters were changed while other ranks held copies of them; change them after "
                "backward, or run forward passes without backward under torch.no_grad()"
            )
        if self.state is State.UNSHARDED:
            return
        self._wait()
        for parameter in self.parameters:
            parameter.show_full()
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Free the copies of the parameters."""
        if self.state is State.RESTING:
            return
        if self.state is State.COMING:
            self._wait()
        else:
            for parameter in self.parameters:
                parameter.show_rest()
        assert self._flat is not None, "there is a buffer while parameters are unsharded"
        self._flat.untyped_storage().resize_(0)
        self.state = State.RESTING

    def _wait(self) -> None:
        # gloo's own threads write to the buffer until then.
        with self._unchanged:
            for work in self._works:
                work.wait()
        self._works = []

    def _rest_versions(self) -> list[int]:
        # DTensor operations count on the DTensor alone, and those on its local tensor there.
        return [parameter.rest._version + local(parameter.rest)._version for parameter in self.mine]

    def _buffer(self) -> Tensor:
        """The flat buffer, without storage until it is gathered, with a parameter for each view of it."""
        if self._flat is not None:
            return self._flat
        for parameter in self.parameters:
            if parameter.rest.is_meta:
                raise ValueError(f"{parameter.fqn}: on the meta device; give it storage (to_empty) before use")
        dtypes = {parameter.rest.dtype for parameter in self.parameters}
        dtype = self._dtype if self._dtype is not None else dtypes.pop()
        sizes = [parameter.face.shape.numel() for parameter in self.parameters]
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
        self._views = [
            self._flat[start:stop].view(parameter.face.shape)
            for parameter, (start, stop) in zip(self.parameters, pairwise(accumulate(sizes, initial=0)), strict=True)
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.full = nn.Parameter(parameter.face.wrap(view), requires_grad=parameter.rest.requires_grad)
        return self._flat

    def trained(self) -> Iterator[OwnedParameter]:
        """The parameters that get gradients."""
        return (parameter for parameter in self.parameters if parameter.used.requires_grad)
