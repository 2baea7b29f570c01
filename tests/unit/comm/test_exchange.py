"""Streams of an exchange."""

from typing import Any

import torch

from tests.stream_order import Stream, StreamOrder, stream_order
from titan_muon.comm.buffers import BufferSet
from titan_muon.comm.exchange import Exchange
from titan_muon.plan.exchange.phases import Collective, gather_phase
from titan_muon.plan.terms.types import Piece, Segment

__all__ = ["stream_order"]


class Copying:
    """Collectives of a group of one rank, in the current stream."""

    def all_gather(self, output: torch.Tensor, splits: Any, input: torch.Tensor, group: Any) -> list[Any]:
        output.copy_(input)
        return []


def test_results_spread_among_replicas_after_the_write(stream_order: StreamOrder) -> None:
    piece = Piece((Segment(0, 0, 2, 1),), (Segment(0, 0, 3, 1),))
    phase = gather_phase({0: [(0, piece)]}, 0, (0,), Collective.ALL_GATHER)
    exchange = Exchange.__new__(Exchange)
    exchange._module, exchange._stream, exchange._replica_groups = torch.cpu, Stream(), {(0,): None}  # type: ignore[assignment, dict-item]
    exchange.collectives = Copying()  # type: ignore[assignment]
    with stream_order:
        buffers = BufferSet(*(torch.empty(6) for _ in range(5)))
        buffers.home.fill_(2.0)
        exchange._spread(phase, buffers, [])
    assert [stream is exchange._stream for stream, _ in stream_order.log] == [False, True]
    assert buffers.shared.tolist() == [2.0] * 6
