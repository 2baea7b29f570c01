"""The counter of collectives records every kind with the bytes sent by this rank."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks

Calls = dict[str, Callable[[], object]]
Seen = list[tuple[str, int]]

SPLITS = (([1, 1], [1, 2]), ([2, 4], [1, 4]))
"""Elements received from and sent to every rank."""

# Tensors of 6 floats. By call: the operator, and the bytes sent by ranks 0 and 1.
EXPECTED = {
    "all_reduce": ("allreduce", 24, 24),
    "async_all_reduce": ("allreduce", 24, 24),
    "all_gather_into_tensor": ("allgather_base", 24, 24),
    "all_gather": ("allgather", 24, 24),
    "reduce_scatter_tensor": ("reduce_scatter_base", 12, 12),
    "reduce_scatter": ("reduce_scatter", 16, 8),
    "all_to_all_single": ("alltoall_base", 12, 12),
    "ragged_all_to_all_single": ("alltoall_base", 8, 4),
    "all_to_all": ("alltoall", 12, 12),
    "broadcast": ("broadcast", 0, 24),
    "reduce": ("reduce", 24, 0),
    "scatter": ("scatter", 12, 0),
    "gather": ("gather", 0, 24),
    "functional_all_reduce": ("all_reduce", 24, 24),
    "functional_all_gather": ("all_gather_into_tensor", 24, 24),
    "functional_reduce_scatter": ("reduce_scatter_tensor", 12, 12),
    "functional_all_to_all": ("all_to_all_single", 8, 4),
    "functional_broadcast": ("broadcast", 24, 0),
    # 5 x 2 floats in rows: rank 0 stores 3 rows, rank 1 stores 2 and pads.
    "dtensor_full_tensor": ("all_gather_into_tensor", 24, 24),
    "dtensor_sum": ("all_reduce", 4, 4),
    "dtensor_product": ("all_gather_into_tensor", 24, 24),
}


def eager(rank: int) -> Calls:
    x, pair = torch.ones(6), [torch.empty(6), torch.empty(6)]
    received, sent = SPLITS[rank]
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "async_all_reduce": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(12), x),
        "all_gather": lambda: dist.all_gather(pair, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(3), x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty((2, 4)[rank]), [x[:2], x[2:]]),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(6), x),
        "ragged_all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(sum(received)), torch.ones(sum(sent)), received, sent
        ),
        "all_to_all": lambda: dist.all_to_all([torch.empty(3), torch.empty(3)], [x[:3], x[3:]]),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "scatter": lambda: dist.scatter(torch.empty(3), [x[:3], x[3:]] if rank == 0 else None, src=0),
        "gather": lambda: dist.gather(x, pair if rank == 0 else None, dst=0),
    }


def functionals(rank: int, mesh: DeviceMesh) -> Calls:
    x = torch.ones(6)
    received, sent = SPLITS[rank]
    group = (mesh, 0)
    return {
        "functional_all_reduce": lambda: functional.all_reduce(x, "sum", group).sum(),
        "functional_all_gather": lambda: functional.all_gather_tensor(x, 0, group).sum(),
        "functional_reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group).sum(),
        "functional_all_to_all": lambda: functional.all_to_all_single(
            torch.ones(sum(sent)), received, sent, group
        ).sum(),
        "functional_broadcast": lambda: functional.broadcast(x, 0, group).sum(),
    }


def of_dtensors(mesh: DeviceMesh) -> Calls:
    rows = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    return {
        "dtensor_full_tensor": lambda: rows.full_tensor(),
        "dtensor_sum": lambda: rows.sum().full_tensor(),
        "dtensor_product": lambda: rows @ rows.t(),
    }


def see_each(rank: int, world_size: int) -> dict[str, Seen]:
    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (world_size,))
    seen = {}
    for name, call in {**eager(rank), **functionals(rank, mesh), **of_dtensors(mesh)}.items():
        with CollectiveCounter() as counter:
            call()
        seen[name] = [(c.name, c.sent) for c in counter.calls]
    return seen


def point_to_point(rank: int, world_size: int) -> Seen:
    x, peer = torch.ones(6), 1 - rank
    with CollectiveCounter() as counter:
        if rank == 0:
            dist.send(x, peer)
        else:
            dist.recv(x, peer)
        pair = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(6), peer)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        dist.barrier()
    return [(c.name, c.sent) for c in counter.calls]


def test_the_counter_records_every_collective_once_with_the_sent_bytes() -> None:
    seen = run_ranks(see_each, 2)
    assert seen[0].keys() == EXPECTED.keys()
    for rank in range(2):
        assert seen[rank] == {name: [(operator, sent[rank])] for name, (operator, *sent) in EXPECTED.items()}


def test_the_counter_records_point_to_point_calls_and_a_barrier_without_bytes() -> None:
    first, second = run_ranks(point_to_point, 2)
    assert first == [("send", 24), ("send", 24), ("recv", 0), ("barrier", 0)]
    assert second == [("recv", 0), ("send", 24), ("recv", 0), ("barrier", 0)]


def test_the_counter_refuses_an_unknown_operator() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("unheard_of(Tensor tensor) -> Tensor")
    with CollectiveCounter(), pytest.raises(NotImplementedError, match="unheard_of"):
        torch.ops.c10d.unheard_of(torch.ones(1))
