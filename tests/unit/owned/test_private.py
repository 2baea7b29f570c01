"""Meshes of owned parameters and coalesced operations, by private names of PyTorch.

Other private names of `titan_muon/owned/private.py` have the training tests: tests/dist/owned/test_owned_training.py.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.c10d_counter import CollectiveCounter
from titan_muon.owned import is_owned, private
from titan_muon.owned.param import held_elements, holders, place_on_owners


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("owner", [0, 1])
def test_only_holders_store_an_owned_parameter(owner: int) -> None:
    """Rank 0 of the tensor axis holds the first rows of the data-axis owner's matrix."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(15.0).view(5, 3)
    cut = distribute_tensor(whole, mesh["tensor"], [Shard(0)], src_data_rank=None)
    owned = place_on_owners(cut, mesh["data"], [owner])
    assert holders(owned) == ((0, 1) if owner == 0 else (2, 3))
    assert held_elements(owned) == dict(zip(holders(owned), (9, 6), strict=True))
    assert owned.shape == (5, 3)
    assert owned.to_local().tolist() == (whole[:3].tolist() if owner == 0 else [])
    assert is_owned(owned)
    assert is_owned(owned.detach())
    assert is_owned(torch.zeros_like(owned))
    assert not is_owned(cut)


@pytest.mark.usefixtures("four_ranks")
def test_owned_parameters_are_copied_and_pickled() -> None:
    owned = place_on_owners(torch.ones(2, 3), init_device_mesh("cpu", (4,)), [0])
    for copied in (copy.deepcopy(owned), pickle.loads(pickle.dumps(owned))):
        assert is_owned(copied)
        assert holders(copied) == (0,)
        assert copied.device_mesh == owned.device_mesh
        assert copied.to_local().tolist() == owned.to_local().tolist()


@pytest.mark.usefixtures("four_ranks")
def test_an_owned_mesh_has_no_process_group() -> None:
    owned = place_on_owners(torch.ones(2, 3), init_device_mesh("cpu", (4,)), [0])
    with pytest.raises(ValueError, match="neither sharded nor gathered by PyTorch"):
        owned.device_mesh.get_group()


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
    assert group is not None
    assert not private.coalesces(group, device)
    with CollectiveCounter() as counter:
        with private.coalesced(group, device):
            for rank in (1, 3):
                dist.broadcast(torch.ones(2), group_src=rank, group=group)
                dist.reduce(torch.ones(3), group_dst=rank, group=group)
        assert not dist.distributed_c10d._world.pg_coalesce_state, "the group is closed"
        dist.all_reduce(torch.ones(4), group=group)
    assert [call.name for call in counter.calls] == ["broadcast", "reduce", "broadcast", "reduce", "allreduce"]


def test_gloo_does_not_coalesce(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    assert not private.coalesces(group, torch.device("cpu"))
    dist.destroy_process_group()
