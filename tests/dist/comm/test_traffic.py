"""A step follows its plan: bytes and calls in c10d, matrices, FLOPs, and memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from titan_muon import Muon
from titan_muon.options import MuonOptions
from titan_muon.plan.planner import make_plan
from titan_muon.plan.program import BucketProgram, make_program
from titan_muon.plan.summary import Summary, summarize
from titan_muon.plan.terms import types
from titan_muon.plan.terms.machine import Work
from titan_muon.plan.terms.types import Plan
from titan_muon.step.views import Batch

BF16, FP32 = 2, 4
EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")


@dataclass(frozen=True)
class Case:
    """Parameters of some shapes on a mesh."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]


# EVEN divides by 8 ranks; of UNEVEN some are cut unevenly and some have fewer rows than ranks.
EVEN = ((24, 40), (40, 24), (16, 16), (8, 56), (32, 8), (48, 16))
UNEVEN = ((24, 40), (40, 24), (13, 18), (3, 16), (32, 8))
EXPERTS = ((8, 12, 20), (8, 10, 14), (24, 40))
STACKS = ((8, 12, 20), (16, 10, 14))
CASES = {
    2: {
        "fsdp": Case((2,), (Shard(0),), UNEVEN),
        "tp": Case((2,), (Shard(1),), UNEVEN),
    },
    4: {
        "fsdp": Case((4,), (Shard(0),), EVEN),
        "fsdp_uneven": Case((4,), (Shard(0),), UNEVEN),
        "hsdp": Case((2, 2), (Replicate(), Shard(0)), UNEVEN),
        "fsdp_tp_columns": Case((2, 2), (Shard(0), Shard(1)), ((13, 19), (7, 30), (24, 40))),
        "fsdp_tp_rows": Case((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), UNEVEN),
        "ep": Case((4,), (Shard(0),), EXPERTS),
        "ep_efsdp": Case((2, 2), (Shard(1), Shard(0)), EXPERTS),
        "ep_whole": Case((4,), (Shard(0),), STACKS),
    },
    8: {
        "fsdp": Case((8,), (Shard(0),), EVEN),
        "hsdp": Case((2, 4), (Replicate(), Shard(0)), EVEN),
        "fsdp_tp_columns": Case((4, 2), (Shard(0), Shard(1)), UNEVEN),
        "ep_efsdp": Case((2, 4), (Shard(1), Shard(0)), EXPERTS),
        "ep_efsdp_whole": Case((2, 4), (_StridedShard(0, split_factor=4), Shard(0)), STACKS),
    },
}
ONE_BY_ONE = [(world, name, exchange) for world, cases in CASES.items() for name in cases for exchange in EXCHANGES]


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


def build(case: Case, exchange: str, **options: object) -> Watched:
    """The optimizer of a case, with gradients."""
    mesh = init_device_mesh("cpu", case.mesh)
    params = []
    for index, shape in enumerate(case.shapes):
        generator = torch.Generator().manual_seed(index)
        full = [torch.randn(shape, generator=generator) for _ in range(2)]
        param, grad = (distribute_tensor(t, mesh, case.placements, src_data_rank=None) for t in full)
        params.append((f"layers.{index}.weight", nn.Parameter(param)))
        params[-1][1].grad = grad
    return Watched(params, exchange=exchange, **{"orthogonalize": "reference", **options})


def count(optimizer: Watched) -> Counted:
    before = (optimizer.exchange.traffic.calls, optimizer.exchange.traffic.bytes_sent)
    with FlopCounterMode(display=False) as flops, CollectiveCounter() as counter:
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


def count_cases(rank: int, world_size: int) -> dict[tuple[str, str], tuple[Plan, list[Counted]]]:
    """Two steps of every case of this world with every exchange."""
    counted = {}
    for name, case in CASES[world_size].items():
        for exchange in EXCHANGES:
            optimizer = build(case, exchange)
            counted[name, exchange] = (optimizer.plan, [count(optimizer) for _ in range(2)])
    return counted


@cache
def world(world_size: int) -> list[dict[tuple[str, str], tuple[Plan, list[Counted]]]]:
    return run_ranks(count_cases, world_size)


def result(world_size: int, name: str, exchange: str) -> tuple[Plan, Summary, list[Counted]]:
    """The plan, its sums, and the second step of each rank; the first must have been the same."""
    ranks = [counted[name, exchange] for counted in world(world_size)]
    for _, (first, second) in ranks:
        assert first == second
    plan = ranks[0][0]
    return plan, summarize(plan), [steps[1] for _, steps in ranks]


def extra_calls(run: BucketProgram) -> int:
    """gloo gathers equal parts only; a ragged gather is a broadcast per non-empty part."""
    splits = run.gathering.owned_splits
    if run.bucket.exchange == "all_to_all" or len(set(splits)) == 1:
        return 0
    return sum(split > 0 for split in splits) - 1


@pytest.mark.parametrize(("world_size", "name", "exchange"), ONE_BY_ONE)
def test_bytes_and_calls_equal_the_plan(world_size: int, name: str, exchange: str) -> None:
    plan, summary, counted = result(world_size, name, exchange)
    for rank, (cost, mine) in enumerate(zip(summary.ranks, counted, strict=True)):
        extra = sum(extra_calls(run) for run in make_program(plan, rank).buckets)
        assert mine.sent == cost.bytes_sent
        assert mine.calls == cost.collectives + extra
        assert mine.counters == (mine.calls, mine.sent)


@pytest.mark.parametrize(("world_size", "name", "exchange"), ONE_BY_ONE)
def test_the_fault_exchange_sends_four_bytes_per_parameter_if_buckets_exist(
    world_size: int, name: str, exchange: str
) -> None:
    plan, _, counted = result(world_size, name, exchange)
    # A code for each parameter; a hash and its negative for the group and for the number of steps.
    expected = [4 * (len(plan.parameters) + 2 * 2)] if plan.buckets else []
    assert [mine.words for mine in counted] == [expected] * world_size


@pytest.mark.parametrize(("world_size", "name", "exchange"), ONE_BY_ONE)
def test_flops_and_matrices_equal_the_plan(world_size: int, name: str, exchange: str) -> None:
    plan, summary, counted = result(world_size, name, exchange)
    assert max(mine.flops for mine in counted) == max(cost.ns_flops for cost in summary.ranks)
    for mine in counted:
        assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices)
    assert [len(mine.matrices) for mine in counted] == [cost.matrices for cost in summary.ranks]
    if exchange != "all_gather":
        assert sorted(m for mine in counted for m in mine.matrices) == list(range(len(plan.matrices)))


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((8, 8), (types.Replicate(), types.Shard(0))), ((32, 2), (types.Shard(0), types.Shard(1)))],
    ids=["hsdp", "fsdp_tp"],
)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather_reduce_scatter"])
def test_64_ranks_orthogonalize_every_matrix_once(
    mesh: tuple[int, ...], placements: tuple[types.Placement, ...], exchange: str
) -> None:
    layout = types.Layout((128, 96), types.Mesh(mesh, tuple(range(64))), placements)
    stack = types.MatrixStack(1, (types.MatrixRows("", (types.Interval(0, 128),)),))
    parameters = [types.Parameter(f"layers.{i}.weight", f"layers.{i}", layout, stack) for i in range(90)]
    plan = make_plan(parameters, lambda _, rows, cols: Work("", rows * cols), MuonOptions(exchange=exchange))
    done = [m for rank in range(64) for run in make_program(plan, rank).buckets for m in run.matrices]
    assert sorted(done) == list(range(90))
    assert summarize(plan).orthogonalizations == summarize(plan).muon_matrices == 90


@pytest.mark.parametrize("world_size", [4, 8])
def test_an_all_to_all_over_fsdp_sends_the_minimum_of_bytes(world_size: int) -> None:
    plan, _, counted = result(world_size, "fsdp", "all_to_all")
    elements = sum(matrix.numel for matrix in plan.matrices)
    total = sum(mine.sent for mine in counted)
    # The mean over N ranks is 2 (N - 1) / N x P b / N. Multiplied by N² every term is an integer.
    assert total * world_size == 2 * (world_size - 1) * elements * BF16


@pytest.mark.parametrize(("world_size", "name"), [(4, "ep_whole"), (8, "ep_efsdp_whole")])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_whole_experts_are_local(world_size: int, name: str, exchange: str) -> None:
    _, _, counted = result(world_size, name, exchange)
    assert [(mine.calls, mine.sent, mine.words) for mine in counted] == [(0, 0, [])] * world_size
    assert {len(mine.matrices) for mine in counted} == {24 // world_size}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: kept by construction besides the state, the plan's buffers, the workspace,
    the plan's working memory; new in a step besides buffers and workspace."""

    kept: int
    buffers: int
    workspace: int
    work: int
    new_in_step: int
    left_by_step: int


def allocated(fn: Callable[[], object]) -> tuple[object, int, int]:
    """Result of `fn`, the peak of allocated bytes, and the bytes left at the end. PyTorch's profiler records every
    allocation and release of the CPU allocator, also within kernels and on gloo's threads."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = fn()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = list(accumulate((change for _, change in changes), initial=0))
    return returned, max(live), live[-1]


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


def measure(rank: int, world_size: int) -> dict[tuple[str, int], Memory]:
    """For each exchange and number of matrices, the memory of building an optimizer and of its second step."""
    measured = {}
    for exchange in EXCHANGES:
        for number in (8, 32):
            case = Case((world_size,), (Shard(0),), (MATRIX,) * number)
            settle()
            optimizer, _, kept = allocated(partial(build, case, exchange))
            assert isinstance(optimizer, Watched)
            # Parameters and gradients are made there too.
            state = 3 * number * prod(MATRIX) // world_size * FP32
            optimizer.step()
            _, new, left = allocated(partial(step_and_settle, optimizer))
            cost = summarize(optimizer.plan).ranks[rank]
            workspace = prod(MATRIX) * BF16
            new -= cost.buffer_bytes + workspace
            measured[exchange, number] = Memory(kept - state, cost.buffer_bytes, workspace, cost.work_bytes, new, left)
    return measured


@cache
def memory() -> list[dict[tuple[str, int], Memory]]:
    return run_ranks(measure, 4)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("number", [8, 32])
def test_neither_construction_nor_a_step_keeps_memory(exchange: str, number: int) -> None:
    for measured in memory():
        mine = measured[exchange, number]
        # gloo gathers and reduces through a copy of the whole buffer, and sometimes keeps the last copy for a while.
        assert mine.kept < SMALL
        assert mine.new_in_step > -SMALL, "buffers and workspace take memory in the step"
        assert mine.left_by_step < (SMALL if exchange == "all_to_all" else mine.buffers)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_new_memory_in_a_step_is_less_than_the_plans_buffers(exchange: str) -> None:
    # gloo gathers and reduces through a copy of the whole buffer.
    for measured in memory():
        assert measured[exchange, 32].new_in_step <= 1.1 * measured[exchange, 32].buffers


def test_an_all_to_all_uses_the_planned_memory() -> None:
    """Within 10 % of the plan's buffers and working memory, oneDNN's own scratch included."""
    for measured in memory():
        mine = measured["all_to_all", 32]
        assert mine.buffers + mine.workspace + mine.new_in_step <= 1.1 * (mine.buffers + mine.work)


def test_an_all_to_all_step_allocates_the_memory_of_a_single_matrix() -> None:
    # Newton-Schulz holds the matrix twice, the square Gram matrix and the polynomial; oneDNN packs two operands.
    for measured in memory():
        few, many = measured["all_to_all", 8], measured["all_to_all", 32]
        assert many.new_in_step - few.new_in_step < SMALL
        assert many.new_in_step < 6 * prod(MATRIX) * BF16


METHODS: tuple[dict[str, Any], ...] = (
    {"orthogonalize": "auto"},
    {"orthogonalize": "auto", "ns_dtype": "float32"},
    {"orthogonalize": "standard", "ns_dtype": "float16"},
    {"orthogonalize": "gram", "ns_coefficients": "deepseek_v4", "ns_steps": 10},
    {"orthogonalize": "auto", "ns_coefficients": ((1.5, -0.5, 0.0),), "ns_steps": 3},
)


def count_methods(rank: int, world_size: int) -> list[tuple[Plan, Counted, tuple[int, int], tuple[int, int]]]:
    """For each of METHODS on a case of many equal shapes: the counts, and the memory of another step."""
    counted = []
    for options in METHODS:
        optimizer = build(Case((world_size,), (Shard(0),), (*EXPERTS, *(MATRIX,) * 32)), "all_to_all", **options)
        counts = count(optimizer)
        _, new, left = allocated(partial(step_and_settle, optimizer))
        cost = summarize(optimizer.plan).ranks[rank]
        workspace = (
            max(batch.whole.numel() for views in optimizer.engine.step.views for _, batch, _ in views.batches) * BF16
        )
        new -= cost.buffer_bytes + workspace
        counted.append((optimizer.plan, counts, (new, left), (workspace, cost.work_bytes)))
    return counted


@cache
def methods() -> list[list[tuple[Plan, Counted, tuple[int, int], tuple[int, int]]]]:
    return run_ranks(count_methods, 4)


@pytest.mark.parametrize("index", range(len(METHODS)), ids=lambda i: str(METHODS[i]))
def test_flops_equal_the_plan_for_every_method(index: int) -> None:
    for rank, counted in enumerate(methods()):
        plan, mine, *_ = counted[index]
        assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices)
        assert mine.flops == summarize(plan).ranks[rank].ns_flops
        assert len(mine.matrices) == summarize(plan).ranks[rank].matrices


@pytest.mark.parametrize("index", range(len(METHODS)), ids=lambda i: str(METHODS[i]))
def test_stacks_use_the_planned_memory(index: int) -> None:
    """Without buffers and the stack. oneDNN's scratch and the momentum of a piece are additional."""
    for counted in methods():
        plan, _, (new, left), (workspace, work) = counted[index]
        assert max(work_of.batch for work_of in plan.works) > 1
        assert left < SMALL
        assert workspace < work
        assert 0.5 * (work - workspace) < new <= 1.1 * work
