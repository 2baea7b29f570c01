"""Results over replicas by all-gathers: the bits of sending to all replicas, and the planned traffic."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.shared import drawn
from titan_muon import Muon
from titan_muon.options import Machine
from titan_muon.plan import summarize

STEPS = 3
SHAPES = {"wide": (8, 24), "tall": (21, 10), "short": (3, 16), "experts": (6, 8, 12), "last": (16, 8)}
# Traffic between replicas takes no time, or each collective takes a second for any bytes.
SLOW_LINKS = Machine(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
SLOW_CALLS = Machine(network_gb=1e6, node_gb=1e6, network_latency_us=1e6, node_latency_us=1e6)
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference", "weight_decay": 0.1}
HSDP = (Replicate(), Shard(0))


@dataclass(frozen=True)
class Case:
    """A mesh with placements, or plain tensors on all ranks if `mesh` is None."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] = ()


# Two replicas, whole on two ranks, have equal traffic either way.
CASES = {
    4: {
        "two of two": Case((2, 2), HSDP),
        "four, whole": Case((4, 1), HSDP),
        "replicated": Case((4,), (Replicate(),)),
        "plain": Case((4,)),
    },
    8: {
        "two of four": Case((2, 4), HSDP),
        "four of two": Case((4, 2), HSDP),
        # The replica groups have two axes, and no mesh has a process group of both.
        "four of two on two axes": Case((2, 2, 2), (Replicate(), Shard(0), Replicate())),
        "two of two by columns": Case((2, 2, 2), (Replicate(), Shard(0), Shard(1))),
        "two of two by rows": Case((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "momentum of one copy": {"state": "owner"},
    "in several rounds": {"buffer_bytes": 6000},
    "gradients released": {"release_grads": True},
}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Training:
    """The shapes on a mesh, and the Muon."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.mesh = case, init_device_mesh("cpu", case.mesh)
        self.params = {name: nn.Parameter(self.place(value)) for name, value in full(0).items()}
        self.muon = Muon(list(self.params.items()), **(OPTIONS | options))

    def place(self, value: Tensor) -> Tensor:
        if not self.case.placements:
            return value.clone()
        return distribute_tensor(value, self.mesh, self.case.placements, src_data_rank=None)

    def step(self, seed: int) -> None:
        for name, grad in full(seed).items():
            self.params[name].grad = self.place(grad)
        self.muon.step()

    def exchanges(self) -> set[str]:
        return {bucket.exchange for bucket in self.muon.plan.buckets}

    def tensors(self) -> dict[str, Tensor]:
        averages = {f"momentum of {n}": self.muon.state[p]["momentum_buffer"] for n, p in self.params.items()}
        return {name: local(tensor) for name, tensor in {**self.params, **averages}.items()}


full = partial(drawn, SHAPES)


@dataclass(frozen=True)
class Comparison:
    """Differences from an exchange with all replicas, counted and planned traffic of the last step, and bytes of
    shared buffers kept between steps."""

    exchanges: tuple[set[str], set[str]]
    differs: list[str]
    counted: tuple[int, int]
    counters: tuple[int, int]
    planned: tuple[int, int]
    kept: int


def compare(rank: int, world_size: int, variant: str) -> dict[str, Comparison]:
    results = {}
    for name, case in CASES[world_size].items():
        ours, theirs = (Training(case, machine=m, **VARIANTS[variant]) for m in (SLOW_LINKS, SLOW_CALLS))
        for seed in range(1, STEPS + 1):
            before = ours.muon.exchange.traffic.calls, ours.muon.exchange.traffic.bytes_sent
            with CollectiveCounter() as counter:
                ours.step(seed)
            theirs.step(seed)
        calls = [call for call in counter.calls if call.name != "allreduce"]
        after, cost = ours.muon.exchange.traffic, summarize(ours.muon.plan).ranks[rank]
        others = theirs.tensors()
        results[name] = Comparison(
            (ours.exchanges(), theirs.exchanges()),
            [name for name, value in ours.tensors().items() if not torch.equal(value, others[name])],
            (len(calls), sum(call.sent for call in calls)),
            (after.calls - before[0], after.bytes_sent - before[1]),
            (cost.collectives, cost.bytes_sent),
            sum(
                parcel.view.untyped_storage().nbytes()
                for run in ours.muon.engine.rank.buffers.buckets
                if run
                for parcel in run.stored
            ),
        )
    return results


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hierarchical_has_the_bits_of_all_to_all_and_the_planned_bytes(world_size: int, variant: str) -> None:
    for cases in run_ranks(compare, world_size, variant):
        for name, result in cases.items():
            assert result.exchanges == ({"hierarchical"}, {"all_to_all"}), f"{name}: the case this test is for"
            assert result.differs == [], name
            assert result.kept == 0, name
            assert result.counted == result.counters, name
            assert result.counters[1] == result.planned[1], name
            # gloo gathers equal parts only; unequal parts are broadcasts, without empty parts.
            assert result.counters[0] >= result.planned[0], name


def overlapped(rank: int, world_size: int) -> tuple[list[str], list[int], list[set[str]]]:
    """Tensors that differ with gathers in backward, the calls of the last backward of both, and both exchanges."""
    case = Case((world_size // 2, 2), HSDP)
    both = [
        Training(case, machine=machine, overlap=overlap)
        for machine, overlap in ((SLOW_LINKS, "backward"), (SLOW_CALLS, "none"))
    ]
    for training in both:
        training.muon.build()
    for step in range(STEPS):
        early = []
        for training in both:
            calls = training.muon.exchange.traffic.calls
            with training.muon.overlap():
                loss: Any = sum(((step + 1) * param * param).sum() for param in training.params.values())
                loss.full_tensor().backward()
            early.append(training.muon.exchange.traffic.calls - calls)
            training.muon.step()
            training.muon.zero_grad()
    ours, theirs = (training.tensors() for training in both)
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    return different, early, [training.exchanges() for training in both]


def test_gathers_of_backward_return_over_replicas_in_the_step() -> None:
    for different, (gathers, without), exchanges in run_ranks(overlapped, 4):
        assert exchanges == [{"hierarchical"}, {"all_to_all"}], "the case this test is for"
        assert gathers > 0
        assert without == 0
        assert different == []
