"""A step follows its plan: bytes and calls in c10d, matrices, FLOPs, and memory."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.memory_use import allocated
from tests.dist.harness import on_ranks, run_ranks
from tests.machines import machine_file
from tests.shared import Operators, muon_keywords
from titan_muon import Muon
from titan_muon.engine.faults.report import FaultReport
from titan_muon.engine.layout.types import Plan
from titan_muon.engine.program.phases import BucketProgram
from titan_muon.engine.program.program import make_program
from titan_muon.engine.step.views import Batch
from titan_muon.forecast.fake_world import fake_world
from titan_muon.options import Machine
from titan_muon.planner.summary import summarize

BF16, FP32 = 2, 4
EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")


@dataclass(frozen=True)
class Stack:
    """Parameters of some shapes on a mesh; without a mesh plain tensors."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """A row: parameters in a world.

    `exchanges`: the exchange of every bucket, if it does not follow from the option. `rank`: the only rank, in a fake
    world.
    """

    world: int
    stacks: tuple[Stack, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    exchanges: tuple[str, ...] = EXCHANGES
    rank: int | None = None


# EVEN divides by 8 ranks; of UNEVEN some are cut unevenly and some have fewer rows than ranks.
EVEN = ((24, 40), (40, 24), (16, 16), (8, 56), (32, 8), (48, 16))
UNEVEN = ((24, 40), (40, 24), (13, 18), (3, 16), (32, 8))
EXPERTS = ((8, 12, 20), (8, 10, 14), (24, 40))
STACKS = ((8, 12, 20), (16, 10, 14))
MIXED = ((8, 24), (21, 10), (3, 16), (6, 8, 12), (16, 8))
ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
TWICE = (_StridedShard(0, split_factor=2), ROWS)
SLOW_LINKS = machine_file(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
"""Traffic between replicas takes no time."""


def case(mesh: tuple[int, ...], placements: tuple[Placement, ...], shapes: Any, world: int = 0, **fields: Any) -> Case:
    return Case(world or prod(mesh), (Stack(mesh, placements, shapes),), **fields)


def fsdp(world: int, rank: int, count: int = 40) -> Case:
    """Ranks beyond 96 or 768 have no row of the smaller matrices; every rank has some of the larger."""
    shapes = ((world * 3 // 4, 16), (world * 2, 8), (world, 24))
    return case((world,), (ROWS,), shapes * count, rank=rank)


def experts(world: int, rank: int, degree: int, number: int, count: int = 20) -> Case:
    """Dense matrices over all ranks; experts over `degree` ranks, with rows sharded over the remaining axis."""
    mesh = (world // degree, degree)
    stacks = (
        Stack((world,), (ROWS,), ((world, 16),) * count),
        Stack(mesh, (COLUMNS, ROWS), ((number, 2 * mesh[0], 8),) * 4),
        Stack(mesh, (_StridedShard(0, split_factor=degree), ROWS), ((2 * world, 6, 8),) * 2),
    )
    return Case(world, stacks, rank=rank)


HIERARCHICAL: dict[str, Any] = {
    "options": {"machine": SLOW_LINKS, "buffer_gib": 6000 / 2**30},
    "exchanges": ("hierarchical",),
}


def in_hops(ranks_per_node: int) -> dict[str, Any]:
    options = {"machine": Machine(ranks_per_node=ranks_per_node), "exchange": "two_hops"}
    return {"options": options, "exchanges": ("two_hops",)}


CASES: dict[str, Case] = {
    "fsdp": case((4,), (ROWS,), EVEN),
    "fsdp, uneven": case((4,), (ROWS,), UNEVEN),
    "fsdp x tp columns": case((2, 2), (ROWS, COLUMNS), ((13, 19), (7, 30), (24, 40))),
    "fsdp x tp rows": case((2, 2), TWICE, UNEVEN),
    "ep x rows": case((2, 2), (COLUMNS, ROWS), EXPERTS),
    "ep, whole": case((4,), (ROWS,), STACKS),
    "plain": case((), (), ((16, 24),) * 8, 4, exchanges=("all_to_all",)),
    "fsdp, 8 ranks": case((8,), (ROWS,), EVEN),
    "hsdp, 8 ranks": case((2, 4), (COPIES, ROWS), EVEN),
    "ep x rows, 8 ranks, whole": case((2, 4), (_StridedShard(0, split_factor=4), ROWS), STACKS),
    "hierarchical, eight replicas": case((8,), (COPIES,), MIXED, **HIERARCHICAL),
    "hierarchical, two of four": case((2, 4), (COPIES, ROWS), MIXED, **HIERARCHICAL),
    # The replica groups have two axes, and no mesh has a process group of both.
    "hierarchical, four of two": case((2, 2, 2), (COPIES, ROWS, COPIES), MIXED, **HIERARCHICAL),
    "hierarchical, two of two by rows": case((2, 2, 2), (COPIES, *TWICE), MIXED, **HIERARCHICAL),
    "two hops, 2 nodes": case((8,), (ROWS,), EVEN, **in_hops(4)),
    "two hops, 4 nodes by rows": case((4, 2), TWICE, UNEVEN, **in_hops(2)),
    "two hops, 3 nodes": case((8,), (ROWS,), UNEVEN, **in_hops(3)),
    "two hops, 1,024 ranks": replace(fsdp(1024, 1000, count=8), **in_hops(8)),
    "fsdp, 128 ranks, first": fsdp(128, 0),
    "fsdp, 128 ranks, last": fsdp(128, 127),
    "fsdp, 1,024 ranks": fsdp(1024, 1000, count=8),
    "experts, 128 ranks": experts(128, 37, degree=8, number=16),
    "experts, 1,024 ranks": experts(1024, 700, degree=64, number=128, count=5),
}
TRIED = [(name, exchange) for name, made in CASES.items() for exchange in made.exchanges]


@dataclass(frozen=True)
class Counted:
    """One rank's step.

    Attributes:
        words: payload of each all-reduce.
        calls: collectives with pieces.
        sent: bytes of these collectives to other ranks.
        counters: calls and bytes by the optimizer's counters.
        flops: of all matrix products.
        matrices: orthogonalized matrices, by index in the plan.
    """

    words: list[int]
    calls: int
    sent: int
    counters: tuple[int, int]
    flops: int
    matrices: list[int]


class Watched(Muon):
    """Muon with a record of orthogonalized matrices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.build()
        mask = self.engine.step.mask
        zero_ = mask.zero_

        def noted(batch: Batch, gradients: Any) -> Any:
            self.__dict__.setdefault("seen", []).extend(batch.matrices)
            return zero_(batch, gradients)

        mask.zero_ = noted  # type: ignore[method-assign]


def build(case: Case, **options: Any) -> Watched:
    """The optimizer of a case, with gradients."""
    params = []
    for stack in case.stacks:
        mesh = init_device_mesh("cpu", stack.mesh) if stack.mesh else None
        for shape in stack.shapes:
            generator = torch.Generator().manual_seed(len(params))
            full = [torch.randn(shape, generator=generator) for _ in range(2)]
            if mesh is not None:
                full = [distribute_tensor(t, mesh, stack.placements, src_data_rank=None) for t in full]
            params.append((f"layers.{len(params)}.weight", nn.Parameter(full[0])))
            params[-1][1].grad = full[1]
    return Watched(params, **muon_keywords(**{"orthogonalize": "reference", **case.options, **options}))


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


def count(optimizer: Watched, counter: CollectiveCounter | None = None) -> Counted:
    before = (optimizer.exchange.traffic.calls, optimizer.exchange.traffic.bytes_sent)
    with FlopCounterMode(display=False) as flops, counter or CollectiveCounter() as counter:
        optimizer.step()
    pieces = [call for call in counter.calls if call.name != "allreduce"]
    return Counted(
        words=[call.payload for call in counter.calls if call.name == "allreduce"],
        calls=len(pieces),
        sent=sum(call.sent for call in pieces),
        counters=(optimizer.exchange.traffic.calls - before[0], optimizer.exchange.traffic.bytes_sent - before[1]),
        flops=flops.get_total_flops(),
        matrices=optimizer.__dict__.pop("seen", []),
    )


def options_of(exchange: str) -> dict[str, str]:
    return {"exchange": exchange} if exchange in EXCHANGES else {}


def count_cases(rank: int, world_size: int) -> dict[tuple[str, str], tuple[Plan, list[Counted]]]:
    """Two steps of every case of this world with every exchange."""
    # Ranks may play several nodes, unlike those of torchrun.
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    counted = {}
    for name, exchange in TRIED:
        if (CASES[name].world, CASES[name].rank) == (world_size, None):
            optimizer = build(CASES[name], **options_of(exchange))
            counted[name, exchange] = (optimizer.plan, [count(optimizer) for _ in range(2)])
    return counted


@cache
def world(world_size: int) -> list[dict[tuple[str, str], tuple[Plan, list[Counted]]]]:
    return run_ranks(count_cases, world_size)


def counts_of(name: str, exchange: str) -> tuple[Plan, dict[int, Counted]]:
    """The plan, and the counts of all ranks, or of the rank of a fake world."""
    made = CASES[name]
    if made.rank is None:
        every = [ranks[name, exchange] for ranks in world(made.world)]
        assert all(first == second for _, (first, second) in every)
        return every[0][0], {rank: counted[1] for rank, (_, counted) in enumerate(every)}
    with fake_world(made.world, made.rank):
        optimizer = build(made, **options_of(exchange))
        return optimizer.plan, {made.rank: count(optimizer, FakeTransport())}


def extra_calls(run: BucketProgram) -> int:
    """gloo gathers equal parts only; a ragged gather is a broadcast of each part that is not empty."""
    splits = run.gathering.owned_splits
    if run.bucket.exchange in ("all_to_all", "two_hops") or len(set(splits)) == 1:
        return 0
    return sum(split > 0 for split in splits) - 1


@pytest.mark.parametrize(("name", "exchange"), TRIED)
def test_calls_bytes_flops_and_matrices_equal_the_plan(name: str, exchange: str) -> None:
    plan, counts = counts_of(name, exchange)
    costs = summarize(plan).ranks
    assert {bucket.exchange for bucket in plan.buckets} <= {exchange}
    # A code for each parameter; hashes of hyperparameters and of the number of steps, and their negatives; two flags.
    # Plain tensors also compare their sizes and the negatives.
    compared = 2 * sum(parameter.plain for parameter in plan.parameters)
    words = [4 * (len(plan.parameters) + compared + 2 * 2 + 2)] if plan.buckets else []
    for rank, mine in counts.items():
        extra = sum(extra_calls(run) for run in make_program(plan, rank).buckets)
        assert mine.sent == costs[rank].bytes_sent
        assert mine.calls == costs[rank].collectives + extra or (exchange == "hierarchical" and mine.calls >= extra)
        assert mine.counters == (mine.calls, mine.sent)
        assert mine.words == words
        assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices)
        assert len(mine.matrices) == costs[rank].matrices
    elements, size = sum(matrix.numel for matrix in plan.matrices), len(counts)
    if name.endswith("whole"):
        assert all((mine.calls, mine.sent, len(mine.matrices)) == (0, 0, 24 // size) for mine in counts.values())
    if name == "plain":
        # The gradients are everywhere, so only results are sent.
        assert all(mine.sent == elements * BF16 * (size - 1) // size for mine in counts.values())
    if CASES[name].rank is None:
        assert max(mine.flops for mine in counts.values()) == max(cost.ns_flops for cost in costs)
        done = sorted(matrix for mine in counts.values() for matrix in mine.matrices)
        assert exchange == "all_gather" or done == list(range(len(plan.matrices)))
    if (name, exchange) == ("fsdp", "all_to_all"):
        # The mean over N ranks is 2 (N - 1) / N x P b / N, the minimum. Multiplied by N² every term is an integer.
        assert sum(cost.bytes_sent for cost in costs) * size == 2 * (size - 1) * elements * BF16


@pytest.mark.parametrize("name", ["fsdp, 1,024 ranks", "experts, 1,024 ranks"])
def test_a_warm_up_sends_the_largest_messages_of_every_group_in_a_few_calls(name: str) -> None:
    """As engines of accelerators do at construction."""
    made = CASES[name]
    with fake_world(made.world, made.rank):
        optimizer = build(made)
        with FakeTransport() as step:
            optimizer.step()
        before = optimizer.exchange.traffic.calls
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
    groups = {bucket.group for bucket in optimizer.plan.buckets if made.rank in bucket.group}
    assert len(warm_up.calls) == 2 * len(groups)
    assert len(warm_up.calls) < len(step.calls)
    assert optimizer.exchange.traffic.calls in (0, before)


def test_a_step_makes_fewer_views_than_matrices() -> None:
    """No views of contiguous gradients, and a few views of buffers for each collective."""
    made = CASES["fsdp, 128 ranks, first"]
    # Unfilled buffers hold arbitrary values, and a step would report them.
    with fake_world(made.world, made.rank), mock.patch.object(FaultReport, "_add_found"):
        optimizer = build(made)
        with FakeTransport():
            optimizer.step()
        with FakeTransport(), Operators() as operators:
            optimizer.step()
    viewing = ("aten.slice.Tensor", "aten.select.int", "aten.view.default")
    views = sum(count for operator, count in operators.counts.items() if str(operator) in viewing)
    assert 0 < views < len(optimizer.plan.matrices) / 4


MATRIX = (64, 128)
SMALL = 8192
"""Bytes of host messages, which gloo may release late; half a matrix."""


def settle() -> None:
    """Give gloo's threads time to release copies made for collectives."""
    dist.barrier()
    time.sleep(0.5)


def step_and_settle(optimizer: Muon) -> None:
    optimizer.step()
    settle()


@on_ranks(4)
@pytest.mark.parametrize("number", [8, 32])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_memory_is_planned_and_none_is_kept(rank: int, exchange: str, number: int) -> None:
    """oneDNN's own scratch included. gloo gathers and reduces through a copy of the whole buffer, and may keep it."""
    settle()
    made = case((4,), (ROWS,), (MATRIX,) * number)
    optimizer, _, kept = allocated(partial(build, made, exchange=exchange))
    # Parameters and gradients are made by the construction too.
    assert kept - 3 * number * prod(MATRIX) // 4 * FP32 < SMALL
    optimizer.step()
    _, new, left = allocated(partial(step_and_settle, optimizer))
    cost = summarize(optimizer.plan).ranks[rank]
    new -= cost.buffer_bytes + prod(MATRIX) * BF16
    assert new > -SMALL, "buffers and workspace take memory in the step"
    assert left < (SMALL if exchange == "all_to_all" else cost.buffer_bytes)
    assert number == 8 or new <= 1.1 * cost.buffer_bytes
    if exchange == "all_to_all":
        # Newton-Schulz holds the matrix twice, the Gram matrix and the polynomial; oneDNN packs two operands.
        assert new < 6 * prod(MATRIX) * BF16
        assert number == 8 or prod(MATRIX) * BF16 + new <= 0.1 * cost.buffer_bytes + 1.1 * cost.work_bytes


METHODS: tuple[dict[str, Any], ...] = (
    {"orthogonalize": "auto"},
    {"orthogonalize": "auto", "ns_dtype": "float32"},
    {"orthogonalize": "standard", "ns_dtype": "float16"},
    {"orthogonalize": "gram", "ns_coefficients": "deepseek_v4", "ns_steps": 10},
    {"orthogonalize": "auto", "ns_coefficients": ((1.5, -0.5, 0.0),), "ns_steps": 3},
)


@on_ranks(4)
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_flops_and_memory_equal_the_plan_for_every_method(rank: int, options: dict[str, Any]) -> None:
    """On many equal shapes; memory without buffers and the stack, of which oneDNN's scratch is no part."""
    optimizer = build(case((4,), (ROWS,), (*EXPERTS, *(MATRIX,) * 32)), **options)
    mine, plan = count(optimizer), optimizer.plan
    _, new, left = allocated(partial(step_and_settle, optimizer))
    cost = summarize(plan).ranks[rank]
    assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices) == cost.ns_flops
    assert max(work.batch for work in plan.works) > 1
    assert left < SMALL
    views = optimizer.engine.step.views
    workspace = max(batch.whole.numel() for view in views for _, batch, _ in view.batches) * BF16
    assert workspace < cost.work_bytes
    assert 0.5 * (cost.work_bytes - workspace) < new - cost.buffer_bytes - workspace <= 1.1 * cost.work_bytes
