"""Streams of owned parameters, and the order of operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.owned_model import Net, loss_of
from tests.dist.owned.test_owned_traffic import loss_of as mixture_loss
from tests.dist.owned.test_owned_traffic import make as make_mixture
from tests.stream_order import StreamOrder, stream_order
from tests.unit.owned.test_collectives import owned_model
from titan_muon import Owners, own
from titan_muon.forecast.fake_world import fake_world
from titan_muon.owned import private

__all__ = ["stream_order"]


@pytest.fixture(autouse=True)
def _coalesces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives like NCCL's."""
    monkeypatch.setattr(private, "coalesces", lambda group, device: True)


@pytest.fixture(params=[(4,), (2, 2)], ids=["shard", "replicate"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Net, Owners]]:
    with owned_model(request.param) as made:
        yield made


def train(net: Net, owners: Owners, steps: int = 3) -> None:
    """Steps of two microbatches, with an evaluation in between."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(steps):
        for part in range(2):
            owners.set_requires_gradient_sync(part == 1 or step == 1)
            loss_of(net, 0, 4, step, part).backward()
        with torch.no_grad():
            loss_of(net, 0, 4, step)
        optimizer.step()
        optimizer.zero_grad()


def test_streams_wait_for_the_memory_of_other_streams(model: tuple[Net, Owners], stream_order: StreamOrder) -> None:
    with stream_order:
        train(*model)
    assert len({stream for stream, _ in stream_order.log}) == (3 if model[1].comm.replicate_group is None else 4)


def test_gradients_are_copied_and_sent_beside_the_computation(
    model: tuple[Net, Owners], stream_order: StreamOrder
) -> None:
    """On FSDP2's streams, with FSDP2's priorities; the next module's backward waits for none of the operations."""
    net, owners = model
    behind: list[bool] = []

    def look(*_: object) -> None:
        reduce = owners.comm.streams.reduce
        behind.append(stream_order.compute.clock.get(reduce.name, 0) < reduce.clock.get(reduce.name, 0))

    for layer in net.layers:
        layer.w2.register_full_backward_pre_hook(look)
    with stream_order:
        loss_of(net, 0, 4, 0).backward()
    assert behind == [False, True, True], "the last layer has nothing before it"
    streams = owners.comm.streams
    assert [stream.priority for stream in (streams.gather, streams.reduce, streams.all_reduce)] == [-1, -1, 0]
    ran_on = {name: {stream for stream, ran in stream_order.log if ran == name} for _, name in stream_order.log}
    assert ran_on["c10d::broadcast_"] == {streams.gather}
    assert ran_on["c10d::reduce_"] == {streams.reduce}
    assert stream_order.compute not in ran_on["aten::copy_"], "neither weights nor gradients are copied there"
    if owners.comm.replicate_group is not None:
        assert ran_on["c10d::allreduce_"] == {streams.all_reduce}


class OutOfMemory(Exception):
    pass


def fail(*_: object) -> None:
    raise OutOfMemory


@pytest.mark.parametrize("place", ["out", "layers.2.w2", "layers.1", "layers.0.wq"])
def test_a_failed_backward_leaves_no_work_on_any_stream(
    model: tuple[Net, Owners], stream_order: StreamOrder, place: str
) -> None:
    """The next forward frees parameters, gradients and reductions, and waits for the users of the memory."""
    net, owners = model
    module = net.get_submodule(place)
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(owners.context.unsharded_bytes)
        seen.append(len(owners.context.reductions.pending))
        seen.extend(
            param.unsharded_accumulated_grad is not None for h in owners.context.hooks for param in h.group.params
        )

    with stream_order:
        handle = module.register_full_backward_pre_hook(fail)
        with pytest.raises(OutOfMemory):
            loss_of(net, 0, 4, 0).backward()
        handle.remove()
        owners.context.enter_forward(0)
        count()
        train(net, owners, 1)
        count()
    assert set(seen) == {0}


def test_the_parts_of_stacks_are_ordered_as_whole_matrices(stream_order: StreamOrder) -> None:
    with fake_world(4):
        net = make_mixture(experts=3)
        owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=list(net.parameters()))
        for layer in net:
            own(layer, owners=owners)
        with stream_order:
            for step in range(2):
                mixture_loss(net, 0, 4, step).backward()
        assert any(parameter.grad is not None for parameter in net.parameters())
