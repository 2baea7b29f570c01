"""The owned parameters of a module, unsharded and resharded together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.exchange.exchange import wait_all
from ..engine.tensors.dtensor import local
from . import private
from .comm import OwnerComm
from .param import OwnedParam, OwnedPart

# [Note: a permanent buffer]
# Autograd saves views of unsharded parameters for backward. So the buffer and its parameters are created once,
# resharding resizes the storage to zero, and refilled storage makes saved views valid again. The content equals the
# content in forward, so the buffer's autograd version counter is restored.


class OwnedState(Enum):
    """Location of a param group's elements."""

    OWNED = "only on the owners"
    UNSHARDING = "in the gather, or gathered and not in use"
    UNSHARDED = "on all ranks"


class OwnedParamGroup:
    """Owned parameters of a module. `param_dtype`: of the unsharded parameters, or None to keep the dtype."""

    def __init__(
        self, name: str, params: Sequence[OwnedParam], comm: OwnerComm, param_dtype: torch.dtype | None
    ) -> None:
        self.name, self.state = name, OwnedState.OWNED
        # So that each owner's elements are a single run, see [Note: owned tensors].
        self.params = tuple(sorted(params, key=lambda param: (len(param.parts) > 1, param.parts[0].owner)))
        self._comm, self._param_dtype = comm, param_dtype
        # Once, because with many experts the host time in forward matters.
        self._mine, self._runs = owned_by(comm.shard_rank, self.params), runs(parts_of(self.params))
        self._buffer: Tensor | None = None
        self._views: dict[OwnedParam, Tensor] = {}
        self._works: list[dist.Work] = []
        self._gathered: Any = None
        self._unchanged: AbstractContextManager[None] = nullcontext()
        self._versions: list[int] = []

    @property
    def trained(self) -> list[OwnedParam]:
        return [param for param in self.params if param.unsharded_param.requires_grad]

    @torch.no_grad()
    def unshard(self) -> None:
        """Start the gather unless started. Collective."""
        if self.state is not OwnedState.OWNED:
            return
        buffer, streams = self._resized_buffer(), self._comm.streams
        # From before the first write until after the last, see [Note: a permanent buffer].
        self._unchanged = private.unchanged_version(buffer)
        # See [Note: streams and memory].
        streams.gather.wait_stream(streams.current)
        with streams.within(streams.gather):
            for part in self._mine:
                part.of(self._views[part.param]).copy_(local(part.param.owned_param), non_blocking=True)
            owners, sizes = self._runs
            self._works = self._comm.gather(owners, buffer.split(sizes))
            self._gathered = streams.gather.record_event()
        self._versions = self._owned_versions()
        self.state = OwnedState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait for the gather and register the unsharded parameters on the module.

        Raises RuntimeError on an owner if its parameters changed since `unshard`.
        """
        # Also if unsharded: an update between forward and backward would change only the owner's weights.
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
        """Keep the unsharded memory for the next backward. Another forward gathers the current weights."""
        if self.state is OwnedState.UNSHARDED:
            for param in self.params:
                param.to_owned()
            self.state = OwnedState.UNSHARDING

    def reshard(self) -> None:
        if self.state is OwnedState.OWNED:
            return
        if self.state is OwnedState.UNSHARDING:
            self._wait()
        else:
            for param in self.params:
                param.to_owned()
        assert self._buffer is not None, "an unsharded group has a buffer"
        self._buffer.untyped_storage().resize_(0)
        self.state = OwnedState.OWNED

    def _wait(self) -> None:
        # Within the context, because gloo's threads write until then and increase the buffer's version.
        with self._unchanged:
            wait_all(self._works)
        self._comm.streams.current.wait_event(self._gathered)
        self._works = []

    def _owned_versions(self) -> list[int]:
        # DTensor operations and optimizers each increase only one of the two versions.
        owned = [part.param.owned_param for part in self._mine]
        return [param._version + local(param)._version for param in owned]

    def _resized_buffer(self) -> Tensor:
        if self._buffer is None:
            # On first use, because a model built on the meta device gets storage only after own().
            for param in self.params:
                if param.owned_param.is_meta:
                    raise ValueError(f"{param.fqn}: on the meta device; give it storage (to_empty) before use")
            dtype = self.params[0].owned_param.dtype if self._param_dtype is None else self._param_dtype
            self._buffer = torch.empty(sum(self._runs[1]), dtype=dtype, device=self._comm.device)
            sizes = [param.unsharded_size for param in self.params]
            self._views = dict(zip(self.params, views(self._buffer, sizes), strict=True))
            for param, view in self._views.items():
                param.init_unsharded_param(view)
        self._buffer.untyped_storage().resize_(self._buffer.nbytes)
        return self._buffer


def parts_of(params: Iterable[OwnedParam]) -> list[OwnedPart]:
    """All parts, in buffer order."""
    return [part for param in params for part in param.parts]


def owned_by(rank: int, params: Iterable[OwnedParam]) -> list[OwnedPart]:
    """Parts of a rank of the shard axis."""
    return [part for part in parts_of(params) if part.owner == rank]


def numel(parts: Iterable[OwnedPart]) -> int:
    """Unsharded elements."""
    return sum(part.size.numel() for part in parts)


def runs(parts: Iterable[OwnedPart]) -> tuple[list[int], list[int]]:
    """Owner and elements of each run of consecutive parts with a common owner."""
    joined = [(owner, numel(of_owner)) for owner, of_owner in groupby(parts, key=lambda part: part.owner)]
    return [owner for owner, _ in joined], [size for _, size in joined]


def views(flat: Tensor, sizes: Sequence[torch.Size]) -> list[Tensor]:
    """Consecutive views of a flat buffer."""
    return [part.view(size) for part, size in zip(flat.split([s.numel() for s in sizes]), sizes, strict=True)]
