"""A rank of 128 and of 1,024 sends the planned bytes. The fake process group stands for the other ranks."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.c10d_counter import CollectiveCounter
from tests.unit.step.test_executor import Operators
from titan_muon import Expert, Muon
from titan_muon.engine.faults.report import FaultReport
from titan_muon.engine.program.program import BucketProgram, make_program
from titan_muon.engine.tensors.process_groups import fake_world
from titan_muon.planner.summary import summarize

EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")


@dataclass(frozen=True)
class Stack:
    """`count` parameters of one global shape on a mesh."""

    count: int
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """Parameters of a rank of a world."""

    world_size: int
    rank: int
    stacks: tuple[Stack, ...]


def fsdp(world_size: int, rank: int, count: int = 40) -> Case:
    """Ranks beyond 96 or 768 have no row of the smaller matrices; every rank has some of the larger."""
    rows = world_size * 3 // 4
    shapes = ((rows, 16), (world_size * 2, 8), (world_size, 24))
    return Case(world_size, rank, tuple(Stack(count, shape, (world_size,), (Shard(0),)) for shape in shapes))


def experts(world_size: int, rank: int, degree: int, number: int, count: int = 20) -> Case:
    """Dense matrices over all ranks; experts over `degree` ranks, with rows sharded over the remaining axis."""
    mesh = (world_size // degree, degree)
    return Case(
        world_size,
        rank,
        (
            Stack(count, (world_size, 16), (world_size,), (Shard(0),)),
            Stack(4, (number, 2 * mesh[0], 8), mesh, (Shard(1), Shard(0))),
            Stack(2, (2 * world_size, 6, 8), mesh, (_StridedShard(0, split_factor=degree), Shard(0))),
        ),
    )


CASES = {
    "fsdp_128_first": fsdp(128, 0),
    "fsdp_128_last": fsdp(128, 127),
    "fsdp_1024": fsdp(1024, 1000, count=8),
    "experts_128": experts(128, 37, degree=8, number=16),
    "experts_1024": experts(1024, 700, degree=64, number=128, count=5),
}


class FakeTransport(CollectiveCounter):
    """Counts calls, and lets the fake group run an all-to-all with an empty input. The fake group leaves outputs
    unchanged, so this class writes valid values for Newton-Schulz."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.ops.c10d.alltoall_base_.default:
            return super().run(func, args, kwargs)
        output, _, group, output_splits, input_splits, *rest = args
        output.normal_()
        nothing = output[:0]
        return func(nothing, nothing, group, [0] * len(output_splits), [0] * len(input_splits), *rest)


def build(case: Case, exchange: str) -> Muon:
    """This rank's optimizer, with gradients."""
    params = []
    for kind, stack in enumerate(case.stacks):
        mesh = init_device_mesh("cpu", stack.mesh)
        for layer in range(stack.count):
            param, grad = (
                distribute_tensor(torch.ones(stack.shape), mesh, stack.placements, src_data_rank=None) for _ in range(2)
            )
            params.append((f"layers.{layer}.{kind}.weight", nn.Parameter(param)))
            params[-1][1].grad = grad
    return Muon(params, expert=Expert(exchange=exchange)).build()


def extra_calls(run: BucketProgram) -> int:
    """A ragged gather is a broadcast of each nonempty part, except on NCCL."""
    splits = run.gathering.owned_splits
    if run.bucket.exchange == "all_to_all" or len(set(splits)) == 1:
        return 0
    return sum(split > 0 for split in splits) - 1


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_of_a_large_world_sends_the_planned_bytes(name: str, exchange: str) -> None:
    case = CASES[name]
    with fake_world(case.world_size, case.rank):
        optimizer = build(case, exchange)
        with FakeTransport() as counter:
            optimizer.step()
        program = make_program(optimizer.plan, case.rank)
    cost = summarize(optimizer.plan).ranks[case.rank]
    pieces = [call for call in counter.calls if call.name != "allreduce"]
    assert cost.rank == case.rank
    assert sum(call.sent for call in pieces) == cost.bytes_sent > 0
    assert len(pieces) == cost.collectives + sum(extra_calls(run) for run in program.buckets)
    assert (optimizer.exchange.traffic.calls, optimizer.exchange.traffic.bytes_sent) == (len(pieces), cost.bytes_sent)
    assert len(counter.calls) - len(pieces) == 1


@pytest.mark.parametrize("name", ["fsdp_1024", "experts_1024"])
def test_a_warm_up_sends_the_largest_messages_of_every_group_in_a_few_calls(name: str) -> None:
    """As engines of accelerators do at construction."""
    case = CASES[name]
    with fake_world(case.world_size, case.rank):
        optimizer = build(case, "all_to_all")
        with FakeTransport() as step:
            optimizer.step()
        optimizer.engine.rank.buffers.memory.take()
        with FakeTransport() as warm_up:
            optimizer.exchange.warm_up(optimizer.plan)
    largest = [
        {ranks: max(call.payload for call in counter.calls if call.ranks == ranks) for ranks in groups}
        for counter in (step, warm_up)
        for groups in [{call.ranks for call in counter.calls if call.name != "allreduce"}]
    ]
    assert largest[0] == largest[1]
    # A gather and a return of each group, for any number of matrices.
    groups = {bucket.group for bucket in optimizer.plan.buckets if case.rank in bucket.group}
    assert len(warm_up.calls) == 2 * len(groups)
    assert len(warm_up.calls) < len(step.calls)
    assert optimizer.exchange.traffic.calls == 0


def test_a_step_makes_fewer_views_than_matrices() -> None:
    """No views of contiguous gradients, and a few views of buffers for each collective."""
    case = fsdp(128, 0)
    # Unfilled buffers hold arbitrary values, and a step would report them.
    with fake_world(case.world_size, case.rank), mock.patch.object(FaultReport, "_add_found"):
        optimizer = build(case, "all_to_all")
        with FakeTransport():
            optimizer.step()
        with FakeTransport(), Operators() as operators:
            optimizer.step()
    views = sum(operators.counts[f"aten.{name}"] for name in ("slice.Tensor", "select.int", "view.default"))
    assert views < len(optimizer.plan.matrices) / 4
