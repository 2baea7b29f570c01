"""The collectives and streams of owned parameters: broadcasts from the owners, and reductions to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.exchange import Traffic
from ..tensors.dtensor import local
from . import private
from .param import OwnedParam, OwnedPart

HIGH_PRIORITY = -1

# [Note: streams and memory]
# - Memory is of the stream that was current when it was allocated, and is free for that stream's next kernels as soon
#   as the host lets go of it. So its stream has to wait before that for whatever another one does with it.
# - Unsharded buffers are of the computing stream, as all that reads them is. The gather stream waits for that stream
#   before it fills one, since the memory may be what the last kernel there still reads.
# - Gradients that autograd made are of the computing stream too. They are held until that stream has waited for their
#   copying, which is at the end of the next module's backward.
# - What gradients are copied into and summed in is of the reduce stream. It may be let go as soon as the reduction is
#   launched; what the all-reduce stream does with it is waited for by the reduce stream.
# - The reduce stream waits for the computing one before it allocates: an optimizer may have just read the gradients of
#   the pass before, whose memory this may be.


class Streams:
    """Streams of FSDP2's kinds and priorities; on the CPU they do nothing, and what is called is done on return.

    Attributes:
        gather: fills unsharded buffers on the owner and sends them to all ranks.
        reduce: copies gradients, sends them to the owners, and adds them to what these have.
        all_reduce: sums an owner's gradients over replicas.
    """

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        # Their kernels are few and short, and other ranks wait for them: behind a layer's products, all ranks would be
        # late. The replicas have the time of a whole layer.
        self.gather: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.reduce: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.all_reduce: Any = self._device.Stream()

    @property
    def current(self) -> Any:
        """The stream that computes."""
        return self._device.current_stream()

    def within(self, stream: Any) -> Any:
        """Have what is called in this context run in a stream."""
        return self._device.stream(stream)


@dataclass(frozen=True)
class Peers:
    """The ranks of one tensor-parallel group, and what carries pieces between them.

    Attributes:
        group: process group of these ranks.
        traffic: what was sent from this rank.
    """

    group: dist.ProcessGroup
    traffic: Traffic

    @classmethod
    def of(cls, mesh: DeviceMesh, traffic: Traffic) -> Peers:
        """The peers of this rank on a mesh of tensor parallelism; they alone call this, together."""
        # Not the mesh's own group: what computes is using that, and messages of one group wait for each other.
        ranks = dist.get_process_group_ranks(mesh.get_group())
        return cls(dist.new_group(ranks, use_local_synchronization=True), traffic)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def scatter(self, parts: Iterable[OwnedPart], unsharded: Mapping[OwnedParam, Tensor]) -> None:
        """Fill what this rank has in `unsharded` of parts that a peer holds, and send the others theirs."""
        messages = []
        for part in parts:
            mine = part.of(unsharded[part.param])
            if part.holder == self.rank:
                # In the dtype of computing, as it is sent on: less to send.
                pieces = ((peer, part.stored(peer).to(mine).contiguous()) for peer in self._others())
                messages += [self._message(dist.isend, piece, peer) for peer, piece in pieces]
            elif part.holder is not None:
                messages.append(self._message(dist.irecv, mine, part.holder))
        self._exchange(messages)

    def collect(self, parts: Sequence[OwnedPart], sums: Sequence[Tensor]) -> Iterator[tuple[OwnedPart, Tensor]]:
        """The parts that are held here with their gradients, whole; `sums` are of what this rank computes with."""
        messages: list[dist.P2POp] = []
        gathered: list[tuple[OwnedPart, Tensor, dict[int, Tensor]]] = []
        for part, total in zip(parts, sums, strict=True):
            if part.holder is None:
                gathered.append((part, total, {}))
            elif part.holder == self.rank:
                whole = total.new_empty(local(part.param.owned_param).shape)
                whole[part.piece(self.rank)] = total
                others = {peer: torch.empty_like(whole[part.piece(peer)]).contiguous() for peer in self._others()}
                messages += [self._message(dist.irecv, piece, peer) for peer, piece in others.items()]
                gathered.append((part, whole, others))
            else:
                messages.append(self._message(dist.isend, total, part.holder))
        self._exchange(messages)
        for part, whole, others in gathered:
            for peer, piece in others.items():
                whole[part.piece(peer)] = piece
            yield part, whole

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _message(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        self.traffic.add(tensor.nbytes if operation is dist.isend else 0)
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)

    def _exchange(self, messages: Iterable[dist.P2POp]) -> None:
        """Carry out messages as one group, and have the current stream wait for them; on gloo the host."""
        # A side that the peers do not divide leaves some without a piece: both ends know, and neither sends nothing.
        started = [message for message in messages if message.tensor.numel() > 0]
        for work in dist.batch_isend_irecv(started) if started else ():
            work.wait()


@dataclass(frozen=True)
class OwnerCollectives:
    """What carries a layer's parameters and gradients between the ranks of a group.

    Parts are contiguous tensors, each with its owner, a rank of the group; all ranks give the same owners in the same
    order. Every method starts its operations and returns what there is to wait for, which is nothing if they run in a
    stream.

    Attributes:
        group: process group whose ranks own the parameters.
        in_stream: whether the operations of a layer are launched together, in the stream that is current.
        traffic: what was sent from this rank to gather and reduce.
    """

    group: dist.ProcessGroup
    in_stream: bool
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> OwnerCollectives:
        """The collectives of a group as its backend runs them best."""
        # NCCL launches a group of operations as one kernel, and one that is not asynchronous in the current stream, so
        # that the stream's priority is the kernel's. gloo can do neither: after it has refused to coalesce, later
        # collectives silently do nothing, and one that is not asynchronous stops the host.
        return cls(group, private.coalesces(group, device))

    def gather(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Fill every part with what its owner has in it."""
        return self._start(self._broadcast, owners, parts)

    def reduce(self, owners: Sequence[int], parts: Sequence[Tensor]) -> list[dist.Work]:
        """Have every owner's part hold the sum over all ranks; on other ranks what it holds is lost."""
        return self._start(self._reduce, owners, parts)

    def all_reduce(self, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Sum a tensor over the ranks of another group."""
        work = dist.all_reduce(part, group=group, async_op=not self.in_stream)
        return [] if work is None else [work]

    def _start(
        self, operation: Callable[[Tensor, int], dist.Work | None], owners: Sequence[int], parts: Sequence[Tensor]
    ) -> list[dist.Work]:
        # Before the first is launched: what raises between the start and the end of a group leaves it open for ever.
        owned = [(part, owner) for owner, part in zip(owners, parts, strict=True) if part.numel() > 0]
        if self.in_stream and owned:
            with private.coalesced(self.group, owned[0][0].device):
                for part, owner in owned:
                    operation(part, owner)
            return []
        works = [operation(part, owner) for part, owner in owned]
        return [work for work in works if work is not None]

    def _broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(part.nbytes * (self.group.size() - 1) if owner == self.group.rank() else 0)
        return dist.broadcast(part, group_src=owner, group=self.group, async_op=not self.in_stream)

    def _reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        self.traffic.add(0 if owner == self.group.rank() else part.nbytes)
        return dist.reduce(part, group_dst=owner, group=self.group, async_op=not self.in_stream)
