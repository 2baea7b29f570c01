"""Rounds that forward can hide, and the buckets that end there."""

from itertools import pairwise
from unittest.mock import Mock

import torch

from tests.machines import rates
from tests.unit.plans import plan_of
from titan_muon.engine.layout.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Parameter, Plan, Shard
from titan_muon.engine.step.step import SuspendedBucket
from titan_muon.engine.step.views import BucketViews
from titan_muon.features.forward import ForwardUpdates
from titan_muon.options import Overlap
from titan_muon.planner.timeline import timeline

LAYERS = 8


def planned(overlap: Overlap) -> Plan:
    """Two matrices a layer, the last layer's twice as large."""
    parameters = []
    for layer in range(LAYERS):
        rows = 16 * (1 + (layer == LAYERS - 1))
        stack = MatrixStack(1, (MatrixRows("", (Interval(0, rows),)),))
        layout = Layout((rows, 16), Mesh((2,), (0, 1)), (Shard(0),))
        parameters += [Parameter(f"layers.{layer}.{name}", f"layers.{layer}", layout, stack) for name in ("up", "down")]
    return plan_of(
        parameters,
        overlap=overlap,
        machine=rates(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0, launch_us=0.0),
    )


def test_rounds_follow_forward_and_have_buffers_for_every_hidden_round() -> None:
    plan = planned("forward")
    # The last layer's matrices are large: rounds are even over the ranks too.
    small = [[number for number in bucket.matrices if number < 2 * (LAYERS - 1)] for bucket in plan.buckets]
    # Of matrices that are alike, forward needs the first first.
    assert all(max(first) < min(then) for first, then in pairwise(filter(None, small)))
    assert min(plan.buckets[0].matrices) == 0 < min(plan.buckets[-1].matrices)
    assert plan.buffer_sets == plan.rounds > 2
    assert plan.digest() != planned("none").digest()


def test_a_step_is_not_slower_with_hidden_returns() -> None:
    """With two matrices per rank, rounds in the order of forward are uneven, and cost more than the overlap hides."""
    layout = Layout((64, 64), Mesh((4,), tuple(range(4))), (Shard(0),))
    wide = Layout((64, 192), layout.mesh, layout.placements)
    stack = MatrixStack(1, (MatrixRows("", (Interval(0, 64),)),))
    parameters = [
        Parameter(f"layers.{number}.{name}", f"layers.{number}", of, stack)
        for number in range(4)
        for name, of in (("q", layout), ("up", wide))
    ]
    machine = rates(node_gb=1e-3, tflops=1e-2, tflops_float32=1e-2, node_latency_us=0.0, launch_us=0.0)
    without, overlapped = (
        timeline(plan_of(parameters, overlap=overlap, machine=machine), machine, overlap=overlap).last.seconds
        for overlap in ("none", "forward")
    )
    assert overlapped <= without


def test_a_bucket_without_parameters_of_this_rank_ends_in_forward_with_the_first_other_bucket() -> None:
    rank, overlap, running = Mock(device=torch.device("cpu")), ForwardUpdates(), dict[int, SuspendedBucket]()
    rank.params, rank.program.late = [Mock(param=torch.ones(1))], frozenset({0, 1})
    rank.parameters_of = {0: [], 1: [0]}.__getitem__
    overlap.attach(rank)
    muon = Mock(bucket=lambda views, gradients: (None for _ in range(1)))
    for index in rank.program.late:
        views = BucketViews(index, (), (), (), None, ())
        running[index] = overlap.start(muon, views, Mock())
        assert overlap.keeps(index, running)
    overlap.end_for([rank.params[0].param], [])
    assert not overlap.holds_memory
