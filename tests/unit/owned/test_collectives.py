"""Collectives of owned parameters in a fake world of any size, and the private names of PyTorch that they use."""

from __future__ import annotations

import copy
import pickle
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
from titan_muon.forecast.fake_world import fake_world
from titan_muon.owned import is_owned, private
from titan_muon.owned.param import holders, place_on_owners

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
    return tuple(count_operations(counter) for counter in (forward, backward))


def count_operations(counter: CollectiveCounter) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call in counter.calls:
        counts[call.name] += call.operations
    return counts


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


# Meshes of owned parameters and coalesced operations, by private names of PyTorch


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


@pytest.mark.usefixtures("four_ranks")
def test_operations_are_coalesced_and_the_group_stays_usable() -> None:
    """Also by the fake group, which does not report the ability."""
    group, device = dist.group.WORLD, torch.device("cpu")
    assert not private.coalesces(group, device)
    with CollectiveCounter() as counter:
        with private.coalesced(group, device):
            for rank in (1, 3):
                dist.broadcast(torch.ones(2), group_src=rank, group=group)
                dist.reduce(torch.ones(3), group_dst=rank, group=group)
        assert not dist.distributed_c10d._world.pg_coalesce_state, "the group is closed"
        dist.all_reduce(torch.ones(4), group=group)
    assert [call.name for call in counter.calls] == ["broadcast", "reduce", "broadcast", "reduce", "allreduce"]


@pytest.mark.usefixtures("world_of_one")
def test_gloo_does_not_coalesce() -> None:
    assert not private.coalesces(dist.group.WORLD, torch.device("cpu"))
