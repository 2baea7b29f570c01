"""The owned parameters of one module: unsharded together into one flat buffer, used, and resharded together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..tensors.dtensor import local
from . import private
from .comm import OwnerCollectives, Peers, Streams
from .param import OwnedParam, OwnedPart

# [Note: one buffer for ever]
# Autograd saves views of unsharded parameters for backward. So the buffer and the parameters on it are made once, and
# freeing it is resizing its storage to nothing: once that is filled again, what autograd saved is valid again. What is
# written there is what was there in forward, hence no change to autograd, whose version counter is put back.


@dataclass(frozen=True)
class CommContext:
    """The data-parallel ranks that share a model with owned parameters, and what carries tensors between them.

    Attributes:
        mesh: data-parallel mesh, (shard,) or (replicate, shard).
        collectives: what gathers from the owners and reduces to them, in the group whose ranks own the parameters.
        replicate_group: process group of the ranks that own copies of the same parameters, or None.
        shard_rank: place of this rank among those that own the parameters.
        peers: the ranks of tensor parallelism, of which one may hold what all of them compute with, or None.
    """

    mesh: DeviceMesh
    collectives: OwnerCollectives
    replicate_group: dist.ProcessGroup | None
    shard_rank: int
    peers: Peers | None

    @classmethod
    def of(cls, mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> CommContext:
        """The context of a mesh, and of one of tensor parallelism whose ranks hold matrices for each other.

        Raises ValueError for a mesh of more axes, and on a rank that is not in it.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(f"mesh has {mesh.ndim} axes; give (shard,) or (replicate, shard), as to fully_shard")
        if mesh.get_coordinate() is None:
            ranks = mesh.mesh.flatten().tolist()
            raise ValueError(f"this rank is not in the mesh {ranks}: it can neither own parameters there nor use them")
        axis = mesh.ndim - 1
        replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        collectives = OwnerCollectives.of(mesh.get_group(axis), torch.device(mesh.device_type))
        peers = None if tensor is None else Peers.of(tensor, collectives.traffic)
        return cls(mesh, collectives, replicate_group, mesh.get_local_rank(axis), peers)

    @property
    def shard_size(self) -> int:
        return self.collectives.group.size()

    @property
    def peer_rank(self) -> int:
        """Place of this rank in tensor parallelism; 0 where nobody holds anything for others."""
        return 0 if self.peers is None else self.peers.rank

    @property
    def peer_size(self) -> int:
        """Ranks of tensor parallelism that may hold matrices for each other."""
        return 1 if self.peers is None else self.peers.size

    # At the first use: a model is also built where its device is not, as in a dry run.
    @cached_property
    def streams(self) -> Streams:
        return Streams(self.mesh.device_type)

    @property
    def device(self) -> torch.device:
        # Not the parameters' own device: on meta, or offloaded to the host, they are not where they are used.
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


class OwnedState(Enum):
    """Where the elements of a param group are."""

    OWNED = "on the owners alone"
    UNSHARDING = "on their way to all ranks, or there and not in use"
    UNSHARDED = "on all ranks"


class OwnedParamGroup:
    """Owned parameters that are unsharded, used and resharded together.

    Args:
        name: of the module, for messages.
        params: owned parameters of the module.
        comm: ranks that share them.
        param_dtype: dtype of the unsharded parameters, or None for their own.
    """

    def __init__(
        self, name: str, params: Sequence[OwnedParam], comm: CommContext, param_dtype: torch.dtype | None
    ) -> None:
        self.name, self.state = name, OwnedState.OWNED
        # See [Note: owned tensors]: in another order an owner's run would have others' elements.
        self.params = tuple(sorted(params, key=lambda param: (len(param.parts) > 1, param.parts[0].owner)))
        self._comm, self._param_dtype = comm, param_dtype
        # Once: in a forward of many experts the host would do little else.
        self._mine, self._runs = owned_by(comm.shard_rank, self.params), runs(parts_of(self.params))
        self._stored = [part for part in self._mine if part.holder in (None, comm.peer_rank)]
        self._buffer: Tensor | None = None
        self._views: dict[OwnedParam, Tensor] = {}
        self._works: list[dist.Work] = []
        self._gathered: Any = None
        self._unchanged: AbstractContextManager[None] = nullcontext()
        self._versions: list[int] = []

    @property
    def trained(self) -> list[OwnedParam]:
        """The parameters that get gradients; the same on every rank, as long as all ranks freeze the same ones."""
        return [param for param in self.params if param.unsharded_param.requires_grad]

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that the unsharded parameters take now."""
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    @torch.no_grad()
    def unshard(self) -> None:
        """Start to gather, unless that was done. Ranks start those of different groups in the same order."""
        if self.state is not OwnedState.OWNED:
            return
        buffer, streams = self._resized_buffer(), self._comm.streams
        # From before the first write to after the last: see [Note: one buffer for ever].
        self._unchanged = private.unchanged_version(buffer)
        # See [Note: streams and memory].
        streams.gather.wait_stream(streams.current)
        with streams.within(streams.gather):
            for part in self._stored:
                part.of(self._views[part.param]).copy_(part.stored(self._comm.peer_rank), non_blocking=True)
            if self._comm.peers is not None:
                self._comm.peers.scatter(self._mine, self._views)
            owners, sizes = self._runs
            self._works = self._comm.collectives.gather(owners, buffer.split(sizes))
            self._gathered = streams.gather.record_event()
        self._versions = self._owned_versions()
        self.state = OwnedState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait until they are gathered and have the module compute with the unsharded parameters.

        Raises RuntimeError on an owner whose parameters were changed since `unshard`.
        """
        # Also when unsharded already, from forward to backward: an update in between changes the owner's weights alone,
        # and all other ranks would go on with the old ones.
        if self._versions != self._owned_versions():
            raise RuntimeError(
                f"{self.name}: owned parameters were changed while other ranks held copies of them; change them after "
                "backward, or run forward passes without backward under torch.no_grad()"
            )
        if self.state is OwnedState.UNSHARDED:
            return
        self._wait()
        for param in self.params:
            param.to_unsharded()
        self.state = OwnedState.UNSHARDED

    def keep(self) -> None:
        """Put the unsharded parameters out of use, and leave them where they are for the backward that is next."""
        if self.state is OwnedState.UNSHARDED:
            for param in self.params:
                param.to_owned()
            self.state = OwnedState.UNSHARDING

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        if self.state is OwnedState.OWNED:
            return
        if self.state is OwnedState.UNSHARDING:
            # Freed under a collective, the memory would be another tensor's while others still write to it.
            self._wait()
        else:
            for param in self.params:
                param.to_owned()
        assert self._buffer is not None, "there is a buffer once the group was unsharded"
        self._buffer.untyped_storage().resize_(0)
        self.state = OwnedState.OWNED

    def _wait(self) -> None:
        # gloo's threads write to the buffer until then: put back earlier, its version would count their writes.
        with self._unchanged:
            for work in self._works:
                work.wait()
        self._comm.streams.current.wait_event(self._gathered)
        self._works = []

    def _owned_versions(self) -> list[int]:
        # An operation on the DTensor counts there alone, and one on its local tensor, as an optimizer's, there alone.
        owned = [part.param.owned_param for part in self._stored]
        return [param._version + local(param)._version for param in owned]

    def _resized_buffer(self) -> Tensor:
        """The unsharded buffer with storage to be filled, and with its views and unsharded parameters."""
        if self._buffer is None:
            self._buffer = self._new_buffer()
            sizes = [param.unsharded_size for param in self.params]
            self._views = dict(zip(self.params, views(self._buffer, sizes), strict=True))
            for param, view in self._views.items():
                param.init_unsharded_param(view)
        self._buffer.untyped_storage().resize_(self._buffer.nbytes)
        return self._buffer

    def _new_buffer(self) -> Tensor:
        # At the first use and not in own(): a model built on the meta device gets its storage in between.
        for param in self.params:
            if param.owned_param.is_meta:
                raise ValueError(f"{param.fqn}: on the meta device; give it storage (to_empty) before use")
        own_dtype = self.params[0].owned_param.dtype
        dtype = own_dtype if self._param_dtype is None else self._param_dtype
        return torch.empty(sum(self._runs[1]), dtype=dtype, device=self._comm.device)


def parts_of(params: Iterable[OwnedParam]) -> list[OwnedPart]:
    """The parts of these parameters, in the order of a flat buffer."""
    return [part for param in params for part in param.parts]


def owned_by(rank: int, params: Iterable[OwnedParam]) -> list[OwnedPart]:
    """Those that a rank of the shard axis owns."""
    return [part for part in parts_of(params) if part.owner == rank]


def numel(parts: Iterable[OwnedPart]) -> int:
    """Elements of these parts when they are unsharded."""
    return sum(part.size.numel() for part in parts)


def runs(parts: Iterable[OwnedPart]) -> tuple[list[int], list[int]]:
    """Owners and elements of what lies side by side in a flat buffer of these parts and has one owner."""
    joined = [(owner, numel(mine)) for owner, mine in groupby(parts, key=lambda part: part.owner)]
    return [owner for owner, _ in joined], [size for _, size in joined]


def views(flat: Tensor, sizes: Sequence[torch.Size]) -> list[Tensor]:
    """A flat buffer as tensors of these sizes, one after the other."""
    return [part.view(size) for part, size in zip(flat.split([s.numel() for s in sizes]), sizes, strict=True)]
