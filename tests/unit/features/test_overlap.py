"""Features by themselves: rounds that forward can hide, the mask of idle matrices, and a GradScaler."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.machines import rates
from tests.unit.plans import plan_of
from titan_muon import Expert, Muon, clip_grad_norm_
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


# The mask of matrices without an update, in float64. Bits: tests/parity


@pytest.mark.parametrize("options", [{"idle": "hold"}], ids=str)
def test_float64_trains_with_a_mask_and_a_clip(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.randn(16, 24, dtype=torch.float64))
    muon, before = Muon([("w", param)], expert=Expert(**options)), param.detach().clone()
    param.grad = torch.full_like(param, 1e3)
    assert clip_grad_norm_([param], 1.0) == pytest.approx(1e3 * (16 * 24) ** 0.5)
    muon.step()
    muon.check_last_step()
    assert not torch.equal(param, before)


# A step under a GradScaler leaves nothing behind for the next step


def test_a_plain_step_after_a_failed_scaled_step_has_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], weight_decay=0.0)
    plain = muon.engine.step.algorithm

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    param.grad = torch.randn(6, 8)
    muon.found_inf, muon.grad_scale = torch.zeros(()), torch.tensor(2.0)
    with monkeypatch.context() as patched:
        patched.setattr(muon.engine.step.mask, "zero_", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            muon.step()
    del muon.found_inf, muon.grad_scale
    muon.step()
    assert muon.engine.step.algorithm is plain
    assert not torch.equal(param, torch.ones(6, 8)), "the step is not skipped"


@pytest.mark.parametrize(
    "counted",
    [
        lambda muon: muon.state_dict()["param_groups"],
        lambda muon: deepcopy(muon).param_groups,
        lambda muon: muon.check_last_step() or muon.param_groups,
    ],
    ids=["saved", "copied", "checked"],
)
def test_a_skipped_step_is_not_counted(counted: Callable[[Muon], list[dict[str, int]]]) -> None:
    """The count moves the warm-up of the momentum and the draws of rounding."""
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], momentum_warmup_steps=4)
    for skips in (False, True, True, False, True):
        param.grad = torch.randn(6, 8)
        muon.found_inf = torch.tensor(float(skips))
        muon.step()
    assert [group["step"] for group in counted(muon)] == [2]
    param.grad = torch.randn(6, 8)
    muon.found_inf = torch.tensor(0.0)
    muon.step()
    assert [group["step"] for group in counted(muon)] == [3]
