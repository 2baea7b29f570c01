"""Traffic of results over replicas by all-gathers. tests/parity has the bits."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.machines import machine_file
from tests.shared import drawn
from titan_muon import Expert, Muon
from titan_muon.planner.summary import summarize

SHAPES = {"wide": (8, 24), "tall": (21, 10), "short": (3, 16), "experts": (6, 8, 12), "last": (16, 8)}
# Traffic between replicas takes no time.
SLOW_LINKS = machine_file(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
CASES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "eight, whole": ((8,), (Replicate(),)),
    "two of four": ((2, 4), (Replicate(), Shard(0))),
    # The replica groups have two axes, and no mesh has a process group of both.
    "four of two on two axes": ((2, 2, 2), (Replicate(), Shard(0), Replicate())),
    "two of two by rows": ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
}


def traffic(rank: int, world_size: int) -> dict[str, Any]:
    """By case: exchanges, and (calls, bytes) of the second step as counted by the backend, by Muon, and as planned."""
    results = {}
    for name, (shape, placements) in CASES.items():
        mesh = init_device_mesh("cpu", shape)
        tensors, *grads = (
            [distribute_tensor(full, mesh, placements, src_data_rank=None) for full in drawn(SHAPES, seed).values()]
            for seed in range(3)
        )
        params = [nn.Parameter(tensor) for tensor in tensors]
        muon = Muon(list(zip(SHAPES, params, strict=True)), machine=SLOW_LINKS, expert=Expert(buffer_gib=6000 / 2**30))
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad
            before = muon.exchange.traffic.calls, muon.exchange.traffic.bytes_sent
            with CollectiveCounter() as counter:
                muon.step()
        calls = [call for call in counter.calls if call.name != "allreduce"]
        after, cost = muon.exchange.traffic, summarize(muon.plan).ranks[rank]
        results[name] = (
            {bucket.exchange for bucket in muon.plan.buckets},
            (len(calls), sum(call.sent for call in calls)),
            (after.calls - before[0], after.bytes_sent - before[1]),
            (cost.collectives, cost.bytes_sent),
        )
    return results


def test_hierarchical_sends_the_planned_bytes() -> None:
    for cases in run_ranks(traffic, 8):
        for name, (exchanges, counted, counters, planned) in cases.items():
            assert exchanges == {"hierarchical"}, f"{name}: the case this test is for"
            assert counted == counters, name
            assert counters[1] == planned[1], name
            # gloo gathers equal parts only; unequal parts are broadcasts, without empty parts.
            assert counters[0] >= planned[0], name
