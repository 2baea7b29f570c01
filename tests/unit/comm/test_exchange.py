"""The collectives of an exchange, counted on fake ranks, compared on gloo, and in streams."""

from collections import Counter
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.stream_order import Stream, StreamOrder, stream_order
from tests.unit.plans import mesh_of, mixed_work, parameter_of
from titan_muon.engine.exchange.exchange import BucketBuffers, Collectives, Exchange, wait_all
from titan_muon.engine.layout.types import Piece, Segment, Shard
from titan_muon.engine.program.phases import Collective, gather_phase
from titan_muon.engine.program.program import make_program
from titan_muon.engine.tensors.process_groups import fake_world
from titan_muon.options import MuonOptions
from titan_muon.planner.planner import make_plan

__all__ = ["stream_order"]

SPLITS = (3, 0, 5, 1)


def test_empty_parts_of_different_sizes_are_not_sent() -> None:
    """Results among 128 replicas; 100 replicas have no result."""
    splits = [8 * (rank % 3) if rank < 28 else 0 for rank in range(128)]
    with fake_world(128, 1):
        collectives, parts = Collectives(), list(torch.zeros(sum(splits)).split(splits))
        assert dist.group.WORLD is not None
        with CollectiveCounter() as counter:
            wait_all(collectives.all_gather_uneven(parts, torch.ones(splits[1]), dist.group.WORLD))
    assert Counter(call.name for call in counter.calls) == {"send": 127, "recv": sum(map(bool, splits)) - 1}
    assert (collectives.traffic.calls, collectives.traffic.bytes_sent) == (1, splits[1] * 4 * 127)


def test_the_bucket_with_most_bytes_is_warmed_up() -> None:
    """It has fewer elements than the other, in float32."""
    shapes, warmed = [(96, 128), (64, 128)], list[int]()
    parameters = [parameter_of(f"{i}.w", shape, mesh_of(2), Shard(0)) for i, shape in enumerate(shapes)]
    plan = make_plan(parameters, mixed_work, MuonOptions())
    exchange = Mock(_runs=make_program(plan, 0).buckets, gather=warmed.append)
    Exchange.warm_up(exchange, plan)
    assert [plan.wire_bytes(plan.buckets[index]) for index in warmed] == [4]


def gathered(rank: int, world_size: int) -> list[float]:
    output = torch.full((sum(SPLITS),), -1.0)
    part = torch.full((SPLITS[rank],), float(rank))
    assert dist.group.WORLD is not None
    wait_all(Collectives().all_gather_uneven(list(output.split(SPLITS)), part, dist.group.WORLD))
    return output.tolist()


def test_every_rank_gets_every_part() -> None:
    expected = [float(rank) for rank, size in enumerate(SPLITS) for _ in range(size)]
    assert run_ranks(gathered, len(SPLITS)) == [expected] * len(SPLITS)


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
        buffers = BucketBuffers(*(torch.empty(6) for _ in range(5)), (), {}, {}, {}, None)
        buffers.home.fill_(2.0)
        exchange._spread(phase, buffers, [])
    assert [stream is exchange._stream for stream, _ in stream_order.log] == [False, True]
    assert buffers.shared.tolist() == [2.0] * 6
