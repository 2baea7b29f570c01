"""Updates in forward: hidden rounds, needed waits of streams, and the private names of FSDP2."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.features.test_forward import Run, Sharding, evaluate
from tests.machines import rates
from tests.parity.table import SLOW
from tests.stream_order import Stream, StreamOrder
from tests.unit.plans import mesh_of, parameter_of, plan_of
from titan_muon.engine.layout.types import Plan, Shard
from titan_muon.engine.step.step import SuspendedBucket
from titan_muon.engine.step.views import BucketViews
from titan_muon.features.forward import ForwardUpdates
from titan_muon.features.private import GatheredGroup, own_groups
from titan_muon.forecast.fake_world import fake_world
from titan_muon.options import Overlap
from titan_muon.planner.machine import planning_machine
from titan_muon.planner.timeline import timeline
from titan_muon.plugins.forward_hooks import forward_updates

LAYERS = 8
SHARDINGS = {
    "layers": Sharding(),
    "prefetched": Sharding(prefetches=True),
    "the root too": Sharding(layers=2),
    "linear layers": Sharding(separate=True),
}


@pytest.fixture(params=list(SHARDINGS.values()), ids=list(SHARDINGS))
def ordered(request: pytest.FixtureRequest, stream_order: StreamOrder) -> Iterator[tuple[Run, StreamOrder]]:
    """On rank 0 of two, without the other. Streams are recorded from the start."""
    with fake_world(2):
        yield Run(request.param), stream_order


def train(run: Run) -> None:
    """Steps of two passes each, with unrelated work in reused memory."""
    for step in range(3):
        run.step(step)
        torch.ones(64).add_(1)


def forget_the_step(run: Run, order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_updates(run.muon)._stream, "wait_stream", lambda other: None, raising=False)


def forget_the_update(run: Run, order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FSDP2's streams for reading weights."""
    monkeypatch.setattr(GatheredGroup, "reading_stream", lambda group: Stream())


def forget_the_memory(run: Run, order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prefetched module; the memory's stream would not wait yet."""
    own, wait = forward_updates(run.muon)._stream, order.compute.wait_stream
    monkeypatch.setattr(order.compute, "wait_stream", lambda other: None if other is own else wait(other))


@pytest.mark.parametrize(
    ("ordered", "forget"),
    [
        *((sharding, forget) for sharding in SHARDINGS.values() for forget in (forget_the_step, forget_the_update)),
        (SHARDINGS["prefetched"], forget_the_memory),
    ],
    indirect=["ordered"],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_wait_is_necessary(
    ordered: tuple[Run, StreamOrder], forget: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order = ordered
    with order:
        train(run)
        own = forward_updates(run.muon)._stream
        assert "aten::_foreach_add_" in [name for stream, name in order.log if stream is own]
        forget(run, order, monkeypatch)
        with pytest.raises(AssertionError, match="does not wait for"):
            train(run)


class Reading:
    """The stream of a group's weight reads, with a record of waits for updates."""

    def __init__(self, group: GatheredGroup, stream: Any, waited: list[Tensor]) -> None:
        self.group, self.stream, self.waited = group, stream, waited

    def wait_stream(self, other: Any) -> None:
        self.waited += self.group.params()
        self.stream.wait_stream(other)


@pytest.mark.parametrize("ordered", [SHARDINGS["linear layers"]], indirect=True)
def test_a_module_waits_for_updates_applied_with_another_module(
    ordered: tuple[Run, StreamOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has matrices of both modules, and another stream may have read the second module."""
    run, waited = ordered[0], list[Tensor]()
    real = GatheredGroup.reading_stream
    monkeypatch.setattr(GatheredGroup, "reading_stream", lambda group: Reading(group, real(group), waited))
    run.step(0)
    waited.clear()
    evaluate(run)
    assert sorted(map(id, waited)) == sorted(id(param) for _, param in run.named), "each, and once"
    waited.clear()
    evaluate(run)
    assert not waited, "in the first forward behind a step"


def planned(overlap: Overlap) -> Plan:
    """Two matrices a layer, the last layer's twice as large."""
    rows = [16 * (1 + (layer == LAYERS - 1)) for layer in range(LAYERS) for _ in range(2)]
    parameters = [parameter_of(f"layers.{i // 2}.w{i}", (n, 16), mesh_of(2), Shard(0)) for i, n in enumerate(rows)]
    machine = rates(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0, launch_us=0.0)
    return plan_of(parameters, machine, overlap=overlap)


def test_only_rounds_behind_the_first_layers_are_hidden() -> None:
    plan = planned("forward")
    matrices = [number for bucket in plan.buckets for number in bucket.matrices]
    small = [number for number in matrices if number < 2 * (LAYERS - 1)]
    assert small == sorted(small), "of matrices that are alike the first parameter's results are needed first"
    assert plan.buffer_sets == plan.rounds > 2, "all that is left has buffers of its own"
    played, without = (timeline(plan, planning_machine(SLOW), overlap=overlap) for overlap in ("forward", "none"))
    assert played.last.seconds < without.last.seconds
    assert played.hidden is not None
    assert played.last.seconds + played.hidden == pytest.approx(without.last.seconds)
    assert plan.digest() != planned("none").digest()


def test_a_step_is_not_slower_with_hidden_returns() -> None:
    """With two matrices per rank, rounds in the order of forward are uneven, and cost more than the overlap hides."""
    parameters = [
        parameter_of(f"layers.{i // 2}.w{i}", (64, 64 + 128 * (i % 2)), mesh_of(4), Shard(0)) for i in range(8)
    ]
    machine = rates(node_gb=1e-3, tflops=1e-2, tflops_float32=1e-2, node_latency_us=0.0, launch_us=0.0)
    without, overlapped = (
        timeline(plan_of(parameters, machine, overlap=overlap), machine, overlap=overlap).last.seconds
        for overlap in ("none", "forward")
    )
    assert overlapped <= without


def test_a_bucket_without_parameters_of_this_rank_ends_in_forward_with_the_first_other_bucket() -> None:
    rank, overlap, running = Mock(device=torch.device("cpu")), ForwardUpdates(), dict[int, SuspendedBucket]()
    rank.params, rank.program.late = [Mock(param=torch.ones(1))], frozenset({0, 1})
    rank.parameters_of = {0: [], 1: [0]}.__getitem__
    overlap.attach(rank)
    muon = Mock(bucket=lambda views, gradients: (None for _ in range(1)), program=rank.program)
    for index in rank.program.late:
        views = BucketViews(index, (), (), (), None, ())
        running[index] = overlap.start(muon, views, Mock())
        assert overlap.keeps(index, running)
    overlap.end_for([rank.params[0].param], [])
    assert not overlap.holds_memory


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["shards", "copies"])
def test_weights_are_read_on_the_stream_of_the_copy_in(
    four_ranks: None, shape: tuple[int, ...], stream_order: StreamOrder
) -> None:
    """Or on the compute stream, before FSDP2 has streams and without a gather."""
    net = nn.Linear(8, 8)
    fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]))
    (group,) = own_groups(net)
    assert group.reading_stream() is group.computing_stream() is stream_order.compute
    with stream_order:
        net(torch.ones(1, 8))
        net(torch.ones(1, 8))
    copies = ("fsdp::all_gather_copy_in", "aten::copy_")
    (read,) = {stream for stream, name in stream_order.log if name in copies}
    assert group.reading_stream() is read
    assert (read is stream_order.compute) == (shape == (4, 1))
