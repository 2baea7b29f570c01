"""Between the holder of whole matrices and its tensor-parallel peers, each of which computes with a piece of them.

A holder's pieces go to its peers before these send them on to their data-parallel ranks, and sums of gradients come
back the same way: whatever the ranks, a matrix takes one message for each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..dtensor import local
from ..exchange import Traffic
from .param import OwnedParam, OwnedPart


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
