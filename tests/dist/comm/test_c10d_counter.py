"""The counter of collectives records every kind with the bytes sent by this rank."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks

SPLITS = (([1, 1], [1, 2]), ([2, 4], [1, 4]))
"""Elements received from and sent to every rank."""

# Tensors of 6 floats. By call: the operator, and the bytes sent by ranks 0 and 1.
EXPECTED = {
    "all_reduce": ("allreduce", 24, 24),
    "all_gather_into_tensor": ("allgather_base", 24, 24),
    "all_gather": ("allgather", 24, 24),
    "reduce_scatter": ("reduce_scatter", 16, 8),
    "all_to_all_single": ("alltoall_base", 8, 4),
    "broadcast": ("broadcast", 0, 24),
    "scatter": ("scatter", 12, 0),
    "functional_all_to_all": ("all_to_all_single", 8, 4),
    "functional_broadcast": ("broadcast", 24, 0),
    # 5 x 2 floats in rows: rank 0 stores 3 rows, rank 1 stores 2 and pads.
    "dtensor_full_tensor": ("all_gather_into_tensor", 24, 24),
    "dtensor_sum": ("all_reduce", 4, 4),
    "barrier": ("barrier", 0, 0),
    "send": ("send", 24, 0),
    "recv": ("recv", 0, 0),
}


def see_each(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (world_size,))
    rows = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    x, pair, (received, sent) = torch.ones(6), [torch.empty(6), torch.empty(6)], SPLITS[rank]
    uneven = torch.empty(sum(received)), torch.ones(sum(sent)), received, sent
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(12), x),
        "all_gather": lambda: dist.all_gather(pair, x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty((2, 4)[rank]), [x[:2], x[2:]]),
        "all_to_all_single": lambda: dist.all_to_all_single(*uneven),
        "broadcast": lambda: dist.broadcast(x, 1),
        "scatter": lambda: dist.scatter(torch.empty(3), [x[:3], x[3:]] if rank == 0 else None, src=0),
        "functional_all_to_all": lambda: functional.all_to_all_single(uneven[1], received, sent, (mesh, 0)).sum(),
        "functional_broadcast": lambda: functional.broadcast(x, 0, (mesh, 0)).sum(),
        "dtensor_full_tensor": lambda: rows.full_tensor(),
        "dtensor_sum": lambda: rows.sum().full_tensor(),
        "barrier": dist.barrier,
        # As the last one, because each rank sees only its own half.
        "send": lambda: dist.send(x, 1) if rank == 0 else None,
        "recv": lambda: dist.recv(x, 0) if rank == 1 else None,
    }
    seen = {}
    for name, call in calls.items():
        with CollectiveCounter() as counter:
            call()
        seen[name] = [(c.name, c.sent) for c in counter.calls]
    return seen


def test_the_counter_records_every_collective_once_with_the_sent_bytes() -> None:
    seen = run_ranks(see_each, 2)
    assert seen[0].pop("recv") == seen[1].pop("send") == []
    for rank in range(2):
        assert seen[rank] == {name: [(EXPECTED[name][0], EXPECTED[name][1 + rank])] for name in seen[rank]}
    assert {*seen[0], *seen[1]} == EXPECTED.keys()


def test_the_counter_refuses_an_unknown_operator() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("unheard_of(Tensor tensor) -> Tensor")
    with CollectiveCounter(), pytest.raises(NotImplementedError, match="unheard_of"):
        torch.ops.c10d.unheard_of(torch.ones(1))
