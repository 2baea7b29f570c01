"""Number of operations for a layer's parameters and gradients, in a fake world of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import BLOCKS, Net, Setup, data_mesh, loss_of, make, matrices
from titan_muon import Owners, own
from titan_muon.engine.tensors.process_groups import fake_world
from titan_muon.owned import is_owned, private

OWNERS = 6
"""Of the six matrices of a layer, when there are as many ranks."""


OWNED = Setup("owned")


@contextmanager
def owned_model(
    mesh: tuple[int, ...], *, setup: Setup = OWNED, reshard: bool | None = None, blocks: int = BLOCKS
) -> Iterator[tuple[Net, Owners]]:
    """A model on rank 0 of a fake world: on a mesh of data-parallel ranks, or of data-parallel ranks and `setup`."""
    with fake_world(prod(mesh)):
        net = make(blocks=blocks)
        data = init_device_mesh("cpu", mesh) if setup.tensor == 1 else data_mesh(prod(mesh), setup, net)
        owners = Owners(net, mesh=data, params=matrices(net))
        for layer in net.layers:
            own(layer, owners=owners, reshard_after_forward=reshard)
        yield net, owners


def operations(net: Net) -> tuple[Counter[str], Counter[str]]:
    """Operations of a backend in a forward and its backward, by kind."""
    with CollectiveCounter() as forward:
        loss = loss_of(net, 0, 8, 0)
    with CollectiveCounter() as backward:
        loss.backward()
    return tuple(count_operations(counter) for counter in (forward, backward))  # type: ignore[return-value]


def count_operations(counter: CollectiveCounter) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call in counter.calls:
        counts[call.name] += call.operations
    return counts


@pytest.mark.parametrize("coalesced", [False, True], ids=["gloo", "nccl"])
@pytest.mark.parametrize("world_size", [64, 512])
def test_a_layer_uses_an_operation_per_owner_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, coalesced: bool
) -> None:
    monkeypatch.setattr(private, "coalesces", lambda group, device: coalesced)
    with owned_model((world_size,)) as (net, _):
        forward, backward = operations(net)
    assert forward == {"broadcast": OWNERS * BLOCKS}
    # The last layer's weights are there from forward.
    assert backward == {"broadcast": OWNERS * (BLOCKS - 1), "reduce": OWNERS * BLOCKS}


@pytest.mark.parametrize(("reshard", "gathered"), [(True, BLOCKS), (None, BLOCKS - 1), (False, 0)])
def test_reshard_after_forward_gathers_layers_again_for_backward(reshard: bool | None, gathered: int) -> None:
    """By default all layers but the last, where backward begins."""
    with owned_model((64,), reshard=reshard) as (net, _):
        for _ in range(2):
            forward, backward = operations(net)
            assert forward["broadcast"] == OWNERS * BLOCKS
            assert backward["broadcast"] == OWNERS * gathered


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


def test_buffers_kept_by_a_forward_are_not_reused_by_a_later_forward() -> None:
    """The last layer's copies serve the same layer's backward. After a forward without a backward and an update, no old
    copies remain."""
    for blocks in (1, 3):
        with owned_model((1,), blocks=blocks) as (net, _):
            before = loss_of(net, 0, 1, 0)
            weight = net.layers[-1].w2.weight
            assert is_owned(weight), "between uses a module has its owned parameters, for zero_grad and the like"
            with torch.no_grad():
                weight.zero_()
            assert loss_of(net, 0, 1, 0).item() != before.item()
            assert net.layers[-1].w2.weight is weight


def test_owners_know_a_parameter_without_the_segments_of_wrappers() -> None:
    """And with all segments that only end like a wrapper's."""
    model = nn.Module()
    model.my_orig_mod, model._orig_mod = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
    with fake_world(2):
        owners = Owners(model, mesh=init_device_mesh("cpu", (2,)))
        assert sorted(sum(owners.owners(name)) for name in ("my_orig_mod.weight", "weight")) == [0, 1]
