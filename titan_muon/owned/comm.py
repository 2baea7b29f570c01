"""Collectives and streams of owned parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.exchange import Traffic
from ..tensors.device import current_device
from ..tensors.dtensor import local
from . import private
from .param import OwnedParam, OwnedPart

HIGH_PRIORITY = -1

# [Note: streams and memory]
# - The caching allocator reuses freed memory for later kernels of the stream current at allocation. So this stream must
#   wait for uses on a second stream before the host frees the memory.
# - Unsharded buffers belong to the compute stream, like all readers. The gather stream waits for the compute stream
#   before filling a buffer.
# - Gradients from autograd belong to the compute stream. The host keeps references until the compute stream has waited
#   for the copy of the gradients.
# - The input and the sum of a reduction belong to the reduce stream. The host may free them right after launch, because
#   the reduce stream waits for the all-reduce stream.
# - The reduce stream waits for the compute stream before allocation, because an optimizer may have just read the
#   previous gradients in the same memory.


class Streams:
    """Streams with FSDP2's roles and priorities."""

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        # High priority, because all ranks wait for these kernels. The all-reduce has the time of a whole layer.
        self.gather: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.reduce: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.all_reduce: Any = self._device.Stream()

    @property
    def current(self) -> Any:
        return self._device.current_stream()

    def within(self, stream: Any) -> Any:
        return self._device.stream(stream)


class TensorParallelPeers:
    """The ranks of a tensor-parallel group, and point-to-point messages between them. Collective over the peers."""

    def __init__(self, mesh: DeviceMesh, traffic: Traffic) -> None:
        # Not the mesh's own group, because messages would queue behind the model's collectives.
        ranks = dist.get_process_group_ranks(mesh.get_group())
        self._group, self._traffic = dist.new_group(ranks, use_local_synchronization=True), traffic
        self.rank: int = self._group.rank()
        self.size: int = self._group.size()

    def scatter(self, parts: Iterable[OwnedPart], unsharded: Mapping[OwnedParam, Tensor]) -> None:
        """Fill this rank's pieces in `unsharded`, and send held pieces to the peers."""
        messages = []
        for part in parts:
            view = part.of(unsharded[part.param])
            if part.holder == self.rank:
                # In the compute dtype, for fewer bytes.
                pieces = ((peer, part.stored(peer).to(view).contiguous()) for peer in self._peers())
                messages += [self._message(dist.isend, piece, peer) for peer, piece in pieces]
            elif part.holder is not None:
                messages.append(self._message(dist.irecv, view, part.holder))
        self._exchange(messages)

    def collect(self, parts: Sequence[OwnedPart], sums: Sequence[Tensor]) -> Iterator[tuple[OwnedPart, Tensor]]:
        """The parts held on this rank with whole gradients; `sums`: the gradients of this rank's pieces."""
        messages: list[dist.P2POp] = []
        gathered: list[tuple[OwnedPart, Tensor, dict[int, Tensor]]] = []
        for part, total in zip(parts, sums, strict=True):
            if part.holder is None:
                gathered.append((part, total, {}))
            elif part.holder == self.rank:
                whole = total.new_empty(local(part.param.owned_param).shape)
                whole[part.piece(self.rank)] = total
                from_peers = {p: torch.empty_like(whole[part.piece(p)]).contiguous() for p in self._peers()}
                messages += [self._message(dist.irecv, piece, peer) for peer, piece in from_peers.items()]
                gathered.append((part, whole, from_peers))
            else:
                messages.append(self._message(dist.isend, total, part.holder))
        self._exchange(messages)
        for part, whole, from_peers in gathered:
            for peer, piece in from_peers.items():
                whole[part.piece(peer)] = piece
            yield part, whole

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _message(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        self._traffic.add(tensor.nbytes if operation is dist.isend else 0)
        return dist.P2POp(operation, tensor, group=self._group, group_peer=peer)

    def _exchange(self, messages: Iterable[dist.P2POp]) -> None:
        # After an uneven division both ends skip empty pieces.
        started = [message for message in messages if message.tensor.numel() > 0]
        for work in dist.batch_isend_irecv(started) if started else ():
            work.wait()


class OwnerComm:
    """The data-parallel ranks of a model with owned parameters, and the collectives between them.

    Parts are contiguous tensors, each with an owner, a rank of the shard axis. All ranks pass equal owners in equal
    order. Collectives return the works to wait for: none if the operations run in the current stream.

    Args:
        mesh: (shard,) or (replicate, shard).
        tensor: tensor-parallel mesh with holders, or None.

    Attributes:
        replicate_group: the owners of the same parameters in each replica, or None.
        shard_rank, shard_size: this rank among the owners, and their number.
        peers: the tensor-parallel ranks with holders among them, or None.

    Raises ValueError for an invalid mesh.
    """

    def __init__(self, mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"mesh has {mesh.ndim} axes; give (shard,) or (replicate, shard), as to fully_shard")
        if mesh.get_coordinate() is None:
            ranks = mesh.mesh.flatten().tolist()
            raise ValueError(f"this rank is not in the mesh {ranks}: it can neither own nor use its parameters")
        self.mesh, self.traffic = mesh, Traffic()
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self._group = mesh.get_group(mesh.ndim - 1)
        self.shard_rank, self.shard_size = self._group.rank(), self._group.size()
        self.peers = None if tensor is None else TensorParallelPeers(tensor, self.traffic)
        self.peer_rank = 0 if self.peers is None else self.peers.rank
        self.peer_size = 1 if self.peers is None else self.peers.size
        # NCCL launches coalesced operations as a single kernel in the current stream. gloo does not: after a refused
        # coalescing later collectives silently do nothing, and a synchronous operation blocks the host.
        self._in_stream = private.coalesces(self._group, torch.device(mesh.device_type))

    # Both on first use, because a dry run builds models without the device.

    @cached_property
    def streams(self) -> Streams:
        return Streams(self.mesh.device_type)

    @property
    def device(self) -> torch.device:
        """Not the parameters' device, which may be meta or the host."""
        return current_device(self.mesh.device_type)

    def gather(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        return self._start(self._broadcast, owners, parts)

    def reduce(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Sum every part over all ranks at its owner; other ranks lose the content of the part."""
        return self._start(self._reduce, owners, parts)

    def all_reduce(self, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        work = dist.all_reduce(part, group=group, async_op=not self._in_stream)
        return [] if work is None else [work]

    def _start(
        self, operation: Callable[[Tensor, int], dist.Work | None], owners: Sequence[int], parts: Sequence[Tensor]
    ) -> list[dist.Work]:
        # An exception within a coalesced group leaves the group open forever.
        owned = [(part, owner) for owner, part in zip(owners, parts, strict=True) if part.numel() > 0]
        joined = self._in_stream and bool(owned)
        with private.coalesced(self._group, owned[0][0].device) if joined else nullcontext():
            works = [operation(part, owner) for part, owner in owned]
        return [] if self._in_stream else [work for work in works if work is not None]

    def _broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(part.nbytes * (self.shard_size - 1) if owner == self.shard_rank else 0)
        return dist.broadcast(part, group_src=owner, group=self._group, async_op=not self._in_stream)

    def _reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(0 if owner == self.shard_rank else part.nbytes)
        return dist.reduce(part, group_dst=owner, group=self._group, async_op=not self._in_stream)
