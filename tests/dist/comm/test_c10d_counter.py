"""The counter of collectives records every kind with the bytes sent by this rank."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import on_ranks

SPLITS = (([1, 1], [1, 2]), ([2, 4], [1, 4]))
"""Elements received from and sent to every rank."""


@on_ranks(2)
def test_the_counter_records_every_collective_once_with_the_sent_bytes(rank: int) -> None:
    """Calls with tensors of 6 floats."""
    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (2,))
    # 5 x 2 floats in rows: rank 0 stores 3 rows, rank 1 stores 2 and pads.
    rows = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    x, pair, (received, sent) = torch.ones(6), [torch.empty(6), torch.empty(6)], SPLITS[rank]
    out, ragged = torch.empty(sum(received)), torch.ones(sum(sent))
    # By call: the operator, and the bytes sent by ranks 0 and 1.
    calls = {
        "allreduce": (lambda: dist.all_reduce(x, async_op=True).wait(), 24, 24),
        "allgather_base": (lambda: dist.all_gather_into_tensor(torch.empty(12), x), 24, 24),
        "allgather": (lambda: dist.all_gather(pair, x), 24, 24),
        "reduce_scatter": (lambda: dist.reduce_scatter(torch.empty((2, 4)[rank]), [x[:2], x[2:]]), 16, 8),
        "alltoall_base": (lambda: dist.all_to_all_single(out, ragged, received, sent), 8, 4),
        "broadcast": (lambda: dist.broadcast(x, 1), 0, 24),
        "scatter": (lambda: dist.scatter(torch.empty(3), [x[:3], x[3:]] if rank == 0 else None, src=0), 12, 0),
        "all_to_all_single": (lambda: functional.all_to_all_single(ragged, received, sent, (mesh, 0)).sum(), 8, 4),
        "all_gather_into_tensor": (lambda: rows.full_tensor(), 24, 24),
        "all_reduce": (lambda: rows.sum().full_tensor(), 4, 4),
        "barrier": (dist.barrier, 0, 0),
        ("send", "recv")[rank]: ((lambda: dist.send(x, 1)) if rank == 0 else (lambda: dist.recv(x, 0)), 24, 0),
    }
    for operator, (call, *sent_bytes) in calls.items():
        with CollectiveCounter() as counter:
            call()
        assert [(c.name, c.sent) for c in counter.calls] == [(operator, sent_bytes[rank])]


def test_the_counter_refuses_an_unknown_operator() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("unheard_of(Tensor tensor) -> Tensor")
    with CollectiveCounter(), pytest.raises(NotImplementedError, match="unheard_of"):
        torch.ops.c10d.unheard_of(torch.ones(1))
