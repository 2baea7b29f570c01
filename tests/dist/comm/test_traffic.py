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
    """A row. `exchanges`: of every bucket, if not by the option. `rank`: the only rank, in a fake world."""

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


def batches(**options: Any) -> Case:
    """Many equal shapes, which share calls."""
    return case((4,), (ROWS,), (*EXPERTS, *((64, 128),) * 32), options=options, exchanges=("all_to_all",))


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
    "auto": batches(orthogonalize="auto"),
    "auto in float32": batches(orthogonalize="auto", ns_dtype="float32"),
    "standard in float16": batches(orthogonalize="standard", ns_dtype="float16"),
    "gram": batches(orthogonalize="gram", ns_coefficients="deepseek_v4", ns_steps=10),
    "three steps": batches(orthogonalize="auto", ns_coefficients=((1.5, -0.5, 0.0),), ns_steps=3),
    "fsdp, 128 ranks, first": fsdp(128, 0),
    "fsdp, 128 ranks, last": fsdp(128, 127),
    "fsdp, 1,024 ranks": fsdp(1024, 1000, count=8),
    "experts, 128 ranks": experts(128, 37, degree=8, number=16),
    "experts, 1,024 ranks": experts(1024, 700, degree=64, number=128, count=5),
}
TRIED = [(name, exchange) for name, made in CASES.items() for exchange in made.exchanges]


@dataclass(frozen=True)
class Counted:
    """One rank's step: payload of each all-reduce, collectives with pieces, their bytes to other ranks, and FLOPs."""

    words: list[int]
    calls: int
    sent: int
    flops: int


def build(case: Case, **options: Any) -> Muon:
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
    return Muon(params, **muon_keywords(**{"orthogonalize": "reference", **case.options, **options})).build()


def matrices_of(optimizer: Muon) -> list[int]:
    """The matrices of a step on this rank, by index in the plan."""
    return [
        matrix for views in optimizer.engine.step.views for _, batch, _ in views.batches for matrix in batch.matrices
    ]


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


def count(optimizer: Muon, counter: CollectiveCounter | None = None) -> Counted:
    before = (optimizer.exchange.traffic.calls, optimizer.exchange.traffic.bytes_sent)
    with FlopCounterMode(display=False) as flops, counter or CollectiveCounter() as counter:
        optimizer.step()
    pieces = [call for call in counter.calls if call.name != "allreduce"]
    words = [call.payload for call in counter.calls if call.name == "allreduce"]
    counted = Counted(words, len(pieces), sum(call.sent for call in pieces), flops.get_total_flops())
    after = (optimizer.exchange.traffic.calls, optimizer.exchange.traffic.bytes_sent)
    assert (after[0] - before[0], after[1] - before[1]) == (counted.calls, counted.sent), "the optimizer's counters"
    return counted


def options_of(exchange: str) -> dict[str, str]:
    return {"exchange": exchange} if exchange in EXCHANGES else {}


Counts = tuple[Plan, Counted, list[int]]


def count_cases(rank: int, world_size: int) -> dict[tuple[str, str], Counts]:
    """Every case of this world with every exchange."""
    # Ranks may play several nodes, unlike those of torchrun.
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    counted = {}
    for name, exchange in TRIED:
        if (CASES[name].world, CASES[name].rank) == (world_size, None):
            optimizer = build(CASES[name], **options_of(exchange))
            first, second = (count(optimizer) for _ in range(2))
            assert first == second
            counted[name, exchange] = optimizer.plan, second, matrices_of(optimizer)
    return counted


@cache
def world(world_size: int) -> list[dict[tuple[str, str], Counts]]:
    return run_ranks(count_cases, world_size)


def counts_of(name: str, exchange: str) -> dict[int, Counts]:
    """The plan, counts and matrices of all ranks, or of the rank of a fake world."""
    made = CASES[name]
    if made.rank is None:
        return {rank: cases[name, exchange] for rank, cases in enumerate(world(made.world))}
    with fake_world(made.world, made.rank):
        optimizer = build(made, **options_of(exchange))
        return {made.rank: (optimizer.plan, count(optimizer, FakeTransport()), matrices_of(optimizer))}


def extra_calls(run: BucketProgram) -> int:
    """gloo gathers equal parts only; a ragged gather is a broadcast of each part that is not empty."""
    splits = run.gathering.owned_splits
    if run.bucket.exchange in ("all_to_all", "two_hops") or len(set(splits)) == 1:
        return 0
    return sum(split > 0 for split in splits) - 1


@pytest.mark.parametrize(("name", "exchange"), TRIED)
def test_calls_bytes_flops_and_matrices_equal_the_plan(name: str, exchange: str) -> None:
    counts = counts_of(name, exchange)
    plan = next(iter(counts.values()))[0]
    costs, size = summarize(plan).ranks, len(counts)
    assert {bucket.exchange for bucket in plan.buckets} <= {exchange}
    # A code for each parameter; hashes of hyperparameters and of the number of steps, and their negatives; two flags.
    # Plain tensors also compare their sizes and the negatives.
    compared = 2 * sum(parameter.plain for parameter in plan.parameters)
    words = [4 * (len(plan.parameters) + compared + 2 * 2 + 2)] if plan.buckets else []
    elements = sum(matrix.numel for matrix in plan.matrices)
    for rank, (_, mine, matrices) in counts.items():
        extra = sum(extra_calls(run) for run in make_program(plan, rank).buckets)
        assert mine.sent == costs[rank].bytes_sent
        assert mine.calls == costs[rank].collectives + extra or (exchange == "hierarchical" and mine.calls >= extra)
        assert mine.words == words
        assert mine.flops == sum(plan.matrices[m].flops for m in matrices)
        assert len(matrices) == costs[rank].matrices
        assert not name.endswith("whole") or (mine.calls, mine.sent, len(matrices)) == (0, 0, 24 // size)
        # The gradients of plain tensors are everywhere, so only results are sent.
        assert name != "plain" or mine.sent == elements * BF16 * (size - 1) // size
    if CASES[name].rank is None:
        assert max(mine.flops for _, mine, _ in counts.values()) == max(cost.ns_flops for cost in costs)
        done = sorted(matrix for _, _, matrices in counts.values() for matrix in matrices)
        assert exchange == "all_gather" or done == list(range(len(plan.matrices)))
    if (name, exchange) == ("fsdp", "all_to_all"):
        # The mean over N ranks is 2 (N - 1) / N x P b / N, the minimum. Multiplied by N² every term is an integer.
        assert sum(cost.bytes_sent for cost in costs) * size == 2 * (size - 1) * elements * BF16


# Matrices of two sizes, in rounds of small and of large ones.
SIZES = replace(case((4,), (ROWS,), (*((8, 12),) * 8, *((64, 96),) * 4), options={"planner": "rule"}), rank=1)


@pytest.mark.parametrize("made", [CASES["experts, 1,024 ranks"], SIZES], ids=["experts", "sizes"])
def test_a_warm_up_sends_the_largest_messages_of_every_group_in_a_few_calls(made: Case) -> None:
    """As engines of accelerators do at construction."""
    with fake_world(made.world, made.rank):
        optimizer = build(made)
        with FakeTransport() as step:
            optimizer.step()
        before = optimizer.exchange.traffic.calls
        optimizer.engine.rank.buffers.memory.take()
        with FakeTransport() as warm_up:
            optimizer.exchange.warm_up(optimizer.plan)
    calls = [[call for call in counter.calls if call.name != "allreduce"] for counter in (step, warm_up)]
    largest = [{c.ranks: max(o.payload for o in some if o.ranks == c.ranks) for c in some} for some in calls]
    assert largest[0] == largest[1]
    # A gather and a return of each group, for any number of matrices.
    assert len(warm_up.calls) == 2 * len(largest[1]) < len(step.calls)
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
    _, new, left = allocated(lambda: (optimizer.step(), settle()))
    cost = summarize(optimizer.plan).ranks[rank]
    new -= cost.buffer_bytes + prod(MATRIX) * BF16
    assert new > -SMALL, "buffers and workspace take memory in the step"
    assert left < (SMALL if exchange == "all_to_all" else cost.buffer_bytes)
    assert number == 8 or new <= 1.1 * cost.buffer_bytes
    if exchange == "all_to_all":
        # Newton-Schulz holds the matrix twice, the Gram matrix and the polynomial; oneDNN packs two operands.
        assert new < 6 * prod(MATRIX) * BF16
        assert number == 8 or prod(MATRIX) * BF16 + new <= 0.1 * cost.buffer_bytes + 1.1 * cost.work_bytes
