"""Rounds that backward can hide, and the order of streams meanwhile."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

from tests.dist.features.test_overlap import NAMES, Failed, Run
from tests.machines import rates
from tests.shared import muon_keywords
from tests.stream_order import StreamOrder, stream_order
from tests.unit.plans import plan_of
from titan_muon import Muon
from titan_muon.algorithms.muon import MuonAlgorithm
from titan_muon.features import backward
from titan_muon.features.forward import ForwardUpdates
from titan_muon.options import Overlap
from titan_muon.owned.param import place_on_owners
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.terms.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Parameter, Plan, Shard
from titan_muon.step.foreach import MomentumCall
from titan_muon.step.step import Bucket
from titan_muon.step.views import BucketViews
from titan_muon.tensors.process_groups import fake_world

__all__ = ["stream_order"]

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


def test_rounds_follow_backward_and_have_buffers_for_every_hidden_round() -> None:
    plan = planned("backward")
    # The last layer's matrices are large: rounds are even over the ranks too.
    small = [[number for number in bucket.matrices if number < 2 * (LAYERS - 1)] for bucket in plan.buckets]
    # Of matrices that are alike the last parameter's gradient comes first.
    assert all(min(first) > max(then) for first, then in pairwise(filter(None, small)))
    assert min(plan.buckets[-1].matrices) == 0 < min(plan.buckets[0].matrices)
    assert plan.buffer_sets == plan.rounds > 2
    assert plan.digest() != planned("none").digest()


def test_a_step_is_not_slower_with_hidden_gathers() -> None:
    """With two matrices per rank, rounds in the order of backward are uneven, and cost more than the overlap hides."""
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
        for overlap in ("none", "backward")
    )
    assert overlapped <= without


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh on rank 0 of two, without the other rank."""
    with fake_world(2):
        yield init_device_mesh("cpu", (2,))


@pytest.fixture
def run(mesh: DeviceMesh) -> Run:
    return Run(mesh, overlap="backward")


@pytest.mark.parametrize("other", [{"offload": "state"}, {"state": "owner"}], ids=str)
def test_backward_overlap_refuses_options_without_local_momentum(other: dict[str, str], mesh: DeviceMesh) -> None:
    [(name, _)] = other.items()
    with pytest.raises(ValueError, match=rf"^overlap = 'backward' .*{name} = "):
        Run(mesh, overlap="backward", **other)


@pytest.mark.parametrize("name", ["NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_settings_that_order_collectives_of_different_groups_are_refused_because_of_a_deadlock(
    name: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    Run(mesh, overlap="backward")
    monkeypatch.setattr(
        backward,
        "check_launch_order",
        lambda device, environ, check=backward.check_launch_order: check("cuda", environ),
    )
    with pytest.raises(ValueError, match=rf"^overlap = 'backward' may deadlock with {name}=1: .* on every rank, or"):
        Run(mesh, overlap="backward")
    monkeypatch.setenv(name, "8")
    Run(mesh, overlap="backward")


@pytest.mark.parametrize(("option", "value"), [("overlap", "backward"), ("exchange", "all_gather")])
def test_an_option_of_travelling_matrices_is_refused_for_only_owned_parameters(
    mesh: DeviceMesh, option: str, value: Any
) -> None:
    owned = place_on_owners(nn.Parameter(torch.ones(8, 8)), mesh, [0])
    sharded = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [TorchShard(0)]))
    with pytest.raises(ValueError, match=rf"^{option} = '{value}' has no effect: .*\(layers.0.w\), and no other"):
        Muon([("layers.0.w", owned)], **muon_keywords(**{option: value})).build()
    assert Muon([("layers.0.w", owned), ("layers.1.w", sharded)], **muon_keywords(**{option: value})).plan.buckets


def train(run: Run) -> None:
    """Steps with unrelated work in reused memory after each, and a failed backward."""
    for step in range(3):
        run.backward(step)
        run.step()
        torch.ones(64).add_(1)
        with pytest.raises(Failed):
            run.backward(step, fails=NAMES[1])
        run.muon.zero_grad()


@pytest.fixture
def ordered(stream_order: StreamOrder, run: Run) -> tuple[Run, StreamOrder]:
    """Streams are watched from before there are any."""
    return run, stream_order


def test_streams_wait_for_the_memory_of_other_streams(ordered: tuple[Run, StreamOrder]) -> None:
    run, order = ordered
    with order:
        train(run)
    own = {stream for stream, name in order.log if stream is not order.compute}
    assert len(own) == 1, "what is packed and sent in backward is on a stream of its own"
    sent = [stream for stream, name in order.log if name == "c10d::alltoall_base_"]
    assert own < set(sent), "results return beside it"


def test_a_step_packs_only_the_matrices_that_backward_has_not_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather may still read the send buffer."""
    packed, original = list[int](), MuonAlgorithm.before_gather

    def counted(algorithm: MuonAlgorithm, call: MomentumCall, *tensors: Any) -> None:
        packed.append(len(call.packed))
        original(algorithm, call, *tensors)

    monkeypatch.setattr(MuonAlgorithm, "before_gather", counted)
    run.backward(0)
    sent = sum(packed)
    run.step()
    everything = sum(len(call.packed) for views in run.muon.engine.step.views for call in views.gathers)
    assert 0 < sent <= sum(packed) == everything


def test_a_bucket_without_parameters_of_this_rank_ends_in_forward_with_the_first_other_bucket() -> None:
    rank, overlap, running = Mock(device=torch.device("cpu")), ForwardUpdates(), dict[int, Bucket]()
    rank.params, rank.program.late = [Mock(param=torch.ones(1))], frozenset({0, 1})
    rank.parameters_of = {0: [], 1: [0]}.__getitem__
    overlap.attach(rank, [])
    muon = Mock(bucket=lambda views, gradients: (None for _ in range(1)))
    for index in rank.program.late:
        views = BucketViews(index, (), (), (), None, (), Mock())
        running[index] = overlap.start(muon, views, Mock())
        assert overlap.keeps(index, running)
    overlap.end_for([rank.params[0].param], [])
    assert not overlap.holds_memory


@pytest.mark.parametrize("waits", ["for gradients", "for packing"])
def test_every_wait_is_necessary(ordered: tuple[Run, StreamOrder], waits: str) -> None:
    run, order = ordered
    own = run.muon.engine.overlap.stream
    with order:
        train(run)
        if waits == "for gradients":
            own.wait_stream = lambda other: None
        else:
            order.compute.wait_stream = lambda stream: None  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="does not wait for"):
            train(run)
