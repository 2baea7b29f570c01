"""A step follows its plan: bytes and calls in c10d, matrices, FLOPs, and memory."""

import time
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

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
from tests.dist.harness import run_ranks
from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.engine.layout.types import Plan
from titan_muon.engine.program.program import BucketProgram, make_program
from titan_muon.engine.step.views import Batch
from titan_muon.planner.summary import summarize

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
    4: {
        "fsdp": Case((4,), (Shard(0),), EVEN),
        "fsdp_uneven": Case((4,), (Shard(0),), UNEVEN),
        "fsdp_tp_columns": Case((2, 2), (Shard(0), Shard(1)), ((13, 19), (7, 30), (24, 40))),
        "fsdp_tp_rows": Case((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), UNEVEN),
        "ep_efsdp": Case((2, 2), (Shard(1), Shard(0)), EXPERTS),
        "ep_whole": Case((4,), (Shard(0),), STACKS),
    },
    8: {
        "fsdp": Case((8,), (Shard(0),), EVEN),
        "hsdp": Case((2, 4), (Replicate(), Shard(0)), EVEN),
        "ep_efsdp_whole": Case((2, 4), (_StridedShard(0, split_factor=4), Shard(0)), STACKS),
    },
}


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
    return Watched(params, **muon_keywords(exchange=exchange, **{"orthogonalize": "reference", **options}))


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


def extra_calls(run: BucketProgram) -> int:
    """gloo gathers equal parts only; a ragged gather is a broadcast per non-empty part."""
    splits = run.gathering.owned_splits
    if run.bucket.exchange == "all_to_all" or len(set(splits)) == 1:
        return 0
    return sum(split > 0 for split in splits) - 1


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_calls_bytes_flops_and_matrices_equal_the_plan(world_size: int, name: str, exchange: str) -> None:
    plan, _ = world(world_size)[0][name, exchange]
    done, summary, largest = list[int](), summarize(plan), 0
    # A code for each parameter; hashes of hyperparameters and of the number of steps, and their negatives; two flags.
    words = [4 * (len(plan.parameters) + 2 * 2 + 2)] if plan.buckets else []
    for rank, cost in enumerate(summary.ranks):
        _, (first, mine) = world(world_size)[rank][name, exchange]
        assert first == mine
        assert mine.sent == cost.bytes_sent
        assert mine.calls == cost.collectives + sum(extra_calls(run) for run in make_program(plan, rank).buckets)
        assert mine.counters == (mine.calls, mine.sent)
        assert mine.words == words
        assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices)
        assert len(mine.matrices) == cost.matrices
        done, largest = [*done, *mine.matrices], max(largest, mine.flops)
        if name.endswith("whole"):
            assert (mine.calls, mine.sent, len(mine.matrices)) == (0, 0, 24 // world_size), "whole experts are local"
    assert largest == max(cost.ns_flops for cost in summary.ranks)
    if exchange != "all_gather":
        assert sorted(done) == list(range(len(plan.matrices)))
    if (name, exchange) == ("fsdp", "all_to_all"):
        # The mean over N ranks is 2 (N - 1) / N x P b / N, the minimum. Multiplied by N² every term is an integer.
        total, elements = sum(cost.bytes_sent for cost in summary.ranks), sum(matrix.numel for matrix in plan.matrices)
        assert total * world_size == 2 * (world_size - 1) * elements * BF16


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


def measure(rank: int, world_size: int) -> dict[tuple[str, int], tuple[int, ...]]:
    """By exchange and number of matrices, the bytes of an optimizer and of its second step beside the planned ones:

    kept by construction, new in the step and left by it; and the plan's buffers and working memory.
    """
    measured = {}
    for exchange in EXCHANGES:
        for number in (8, 32):
            case = Case((world_size,), (Shard(0),), (MATRIX,) * number)
            settle()
            optimizer, _, kept = allocated(partial(build, case, exchange))
            optimizer.step()
            _, new, left = allocated(partial(step_and_settle, optimizer))
            cost = summarize(optimizer.plan).ranks[rank]
            # Parameters and gradients are made by the construction too.
            kept -= 3 * number * prod(MATRIX) // world_size * FP32
            new -= cost.buffer_bytes + prod(MATRIX) * BF16
            measured[exchange, number] = kept, new, left, cost.buffer_bytes, cost.work_bytes
    return measured


def test_memory_is_planned_and_none_is_kept() -> None:
    """oneDNN's own scratch included. gloo gathers and reduces through a copy of the whole buffer, and may keep it."""
    for measured in run_ranks(measure, 4):
        for (exchange, number), (kept, new, left, buffers, work) in measured.items():
            assert kept < SMALL
            assert new > -SMALL, "buffers and workspace take memory in the step"
            assert left < (SMALL if exchange == "all_to_all" else buffers)
            if number == 32:
                assert new <= 1.1 * buffers
            if exchange == "all_to_all":
                # Newton-Schulz holds the matrix twice, the Gram matrix and the polynomial; oneDNN packs two operands.
                assert new < 6 * prod(MATRIX) * BF16
                assert prod(MATRIX) * BF16 + new <= 0.1 * buffers + 1.1 * work or number == 8


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


def test_flops_and_memory_equal_the_plan_for_every_method() -> None:
    """Memory without buffers and the stack. oneDNN's scratch and the momentum of a piece are additional."""
    for rank, counted in enumerate(run_ranks(count_methods, 4)):
        for plan, mine, (new, left), (workspace, work) in counted:
            assert mine.flops == sum(plan.matrices[m].flops for m in mine.matrices)
            assert mine.flops == summarize(plan).ranks[rank].ns_flops
            assert max(work_of.batch for work_of in plan.works) > 1
            assert left < SMALL
            assert workspace < work
            assert 0.5 * (work - workspace) < new <= 1.1 * work
