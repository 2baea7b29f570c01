"""The collectives of an exchange, counted on fake ranks, and compared on gloo."""

from collections import Counter

import torch
import torch.distributed as dist

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.shared import fake_ranks
from titan_muon.comm.collectives import Collectives, wait_all

SPLITS = (3, 0, 5, 1)


def test_empty_parts_of_different_sizes_are_not_sent() -> None:
    """Results among 128 replicas; 100 replicas have no result."""
    splits = [8 * (rank % 3) if rank < 28 else 0 for rank in range(128)]
    with fake_ranks(128, 1):
        collectives, parts = Collectives(), list(torch.zeros(sum(splits)).split(splits))
        assert dist.group.WORLD is not None
        with CollectiveCounter() as counter:
            wait_all(collectives.all_gather_uneven(parts, torch.ones(splits[1]), dist.group.WORLD))
    assert Counter(call.name for call in counter.calls) == {"send": 127, "recv": sum(map(bool, splits)) - 1}
    assert (collectives.traffic.calls, collectives.traffic.bytes_sent) == (1, splits[1] * 4 * 127)


def gathered(rank: int, world_size: int) -> list[float]:
    output = torch.full((sum(SPLITS),), -1.0)
    part = torch.full((SPLITS[rank],), float(rank))
    assert dist.group.WORLD is not None
    wait_all(Collectives().all_gather_uneven(list(output.split(SPLITS)), part, dist.group.WORLD))
    return output.tolist()


def test_every_rank_gets_every_part() -> None:
    expected = [float(rank) for rank, size in enumerate(SPLITS) for _ in range(size)]
    assert run_ranks(gathered, len(SPLITS)) == [expected] * len(SPLITS)
