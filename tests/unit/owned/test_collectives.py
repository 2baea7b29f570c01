"""Collectives and streams of owned parameters in a fake world, and the private names of PyTorch that they use."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import BLOCKS, Net, loss_of, make, matrices
from tests.dist.owned.test_owned import loss_of as mixture_loss
from tests.dist.owned.test_owned import make as make_mixture
from tests.shared import unsharded_bytes
from tests.stream_order import StreamOrder
from titan_muon import Owners, own
from titan_muon.forecast.fake_world import fake_world
from titan_muon.owned import is_owned, private
from titan_muon.owned.param import holders, place_on_owners

OWNERS = 6
"""Of the six matrices of a layer, when there are as many ranks."""


@contextmanager
def owned_model(mesh: tuple[int, ...], reshard: bool | None = None) -> Iterator[tuple[Net, Owners]]:
    """A model on rank 0 of a fake world, on a mesh of data-parallel ranks."""
    with fake_world(prod(mesh)):
        net = make(blocks=BLOCKS)
        owners = Owners(net, mesh=init_device_mesh("cpu", mesh), params=matrices(net))
        for layer in net.layers:
            own(layer, owners=owners, reshard_after_forward=reshard)
        yield net, owners


def operations(net: Net) -> tuple[Counter[str], ...]:
    """Operations of a backend in a forward and its backward, by kind."""
    with CollectiveCounter() as forward:
        loss = loss_of(net, 0, 8, 0)
    with CollectiveCounter() as backward:
        loss.backward()
    return tuple(Counter(c.name for c in of.calls for _ in range(c.operations)) for of in (forward, backward))


@pytest.mark.parametrize(
    ("world_size", "coalesced", "reshard", "gathered"),
    # After forward, all layers but the last, where backward begins, are gathered again, or all, or none.
    [(64, False, None, BLOCKS - 1), (512, True, None, BLOCKS - 1), (64, True, True, BLOCKS), (64, False, False, 0)],
)
def test_a_layer_uses_an_operation_per_owner_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, coalesced: bool, reshard: bool | None, gathered: int
) -> None:
    monkeypatch.setattr(private, "coalesces", lambda group, device: coalesced)
    with owned_model((world_size,), reshard=reshard) as (net, _):
        for _ in range(2):
            forward, backward = operations(net)
            assert forward == {"broadcast": OWNERS * BLOCKS}
            assert backward == +Counter(broadcast=OWNERS * gathered, reduce=OWNERS * BLOCKS)


@pytest.mark.parametrize("world_size", [1, 64])
def test_the_operations_of_a_layer_are_a_single_group(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """On a capable backend: as many groups as gathers and reductions, and no operation outside."""
    groups: list[int] = []
    coalesced = private.coalesced

    @contextmanager
    def counted(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
        with CollectiveCounter() as counter, coalesced(group, device):
            yield
        groups.append(len(counter.calls))

    monkeypatch.setattr(private, "coalesces", lambda group, device: True)
    monkeypatch.setattr(private, "coalesced", counted)
    with owned_model((world_size,)) as (net, _), CollectiveCounter() as every:
        loss_of(net, 0, 8, 0).backward()
    gathers, reductions = 2 * BLOCKS - 1, BLOCKS
    assert groups == [min(OWNERS, world_size)] * (gathers + reductions)
    assert len(every.calls) == sum(groups)


def test_owners_know_a_parameter_without_the_segments_of_wrappers() -> None:
    """And with all segments that only end like a wrapper's."""
    model = nn.Module()
    model.my_orig_mod, model._orig_mod = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
    with fake_world(2):
        owners = Owners(model, mesh=init_device_mesh("cpu", (2,)))
        assert sorted(sum(owners.owners(name)) for name in ("my_orig_mod.weight", "weight")) == [0, 1]


@pytest.mark.usefixtures("four_ranks")
def test_owned_parameters_are_copied_and_pickled_and_have_no_process_group() -> None:
    owned = place_on_owners(torch.ones(2, 3), init_device_mesh("cpu", (4,)), [0])
    with pytest.raises(ValueError, match="neither sharded nor gathered by PyTorch"):
        owned.device_mesh.get_group()
    for copied in (copy.deepcopy(owned), pickle.loads(pickle.dumps(owned))):
        assert is_owned(copied)
        assert holders(copied) == (0,)
        assert copied.device_mesh == owned.device_mesh
        assert copied.to_local().tolist() == owned.to_local().tolist()


@pytest.mark.usefixtures("four_ranks")
def test_a_refusal_of_torchs_clip_grad_norm_leads_to_ours() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parameters = [place_on_owners(torch.nn.Parameter(torch.ones(4, 4)), mesh["dp"], [owner]) for owner in (0, 1)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"clip gradients with titan_muon\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


# Streams: the order of operations


@pytest.fixture(params=[(4,), (2, 2)], ids=["shard", "replicate"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Net, Owners]]:
    """With collectives like NCCL's."""
    monkeypatch.setattr(private, "coalesces", lambda group, device: True)
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


@pytest.mark.parametrize("place", ["out", "layers.2.w2", "layers.1", "layers.0.wq"])
def test_a_failed_backward_leaves_no_work_on_any_stream(
    model: tuple[Net, Owners], stream_order: StreamOrder, place: str
) -> None:
    """The next forward frees parameters, gradients and reductions, and waits for the users of the memory."""
    net, owners = model
    module = net.get_submodule(place)
    seen: list[int] = []

    def count(*_: object) -> None:
        kept = (param.unsharded_accumulated_grad for h in owners.context.hooks for param in h.group.params)
        seen.extend((unsharded_bytes(owners), len(owners.context.reductions.pending)))
        seen.extend(grad is not None for grad in kept)

    with stream_order:
        handle = module.register_full_backward_pre_hook(Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            loss_of(net, 0, 4, 0).backward()
        handle.remove()
        owners.context.enter_forward(0)
        count()
        train(net, owners, 1)
        count()
    assert set(seen) == {0}


def test_the_parts_of_stacks_are_ordered_as_whole_matrices(stream_order: StreamOrder, monkeypatch: Any) -> None:
    monkeypatch.setattr(private, "coalesces", lambda group, device: True)
    with fake_world(4):
        net = make_mixture(experts=3)
        owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=list(net.parameters()))
        for layer in net:
            own(layer, owners=owners)
        with stream_order:
            for step in range(2):
                mixture_loss(net, 0, 4, step).backward()
        assert any(parameter.grad is not None for parameter in net.parameters())
