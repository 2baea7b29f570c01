"""PyTorch's private names for owned placement exist and work."""

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
from titan_muon.tensors.dtensor import local


def test_replaced_data_of_a_stored_tensor_becomes_the_parameters_data(four_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    param = place_on_owners(torch.nn.Parameter(torch.zeros(2, 3)), mesh, [0])
    stored = local(param)
    stored.data = torch.ones(2, 3)
    for read in (param.to_local(), param.detach().to_local()):  # type: ignore[attr-defined]
        assert read.data_ptr() == stored.data_ptr()
        assert read.tolist() == [[1.0] * 3] * 2


def test_a_version_is_unchanged_by_later_writes() -> None:
    flat = torch.zeros(6)
    weight = torch.nn.Parameter(flat[2:6].view(2, 2))
    inputs = torch.ones(1, 2, requires_grad=True)
    output = torch.nn.functional.linear(inputs, weight)
    unchanged = private.unchanged_version(flat)
    with torch.no_grad():
        flat.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward(retain_graph=True)
    with unchanged:
        pass
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [[2.0, 2.0]], "backward sees what was written"


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(gradient: torch.Tensor) -> None:
        seen.append(private.backward_pass())
        private.at_end_of_backward(lambda: seen.append("end"))

    y.register_hook(hook)
    assert private.backward_pass() is None
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    numbers = [number for number in seen if number != "end"]
    assert seen == [numbers[0], "end", numbers[1], "end"]
    assert numbers[0] != numbers[1]
    assert private.backward_pass() is None


@pytest.mark.usefixtures("four_ranks")
def test_meshes_of_two_slices_are_joined_and_flattened() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    assert private.joint_mesh(mesh["data"], mesh["tensor"]).mesh.tolist() == [[0, 1], [2, 3]]
    flat = private.flattened(mesh)
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert flat.get_group().size() == 4


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


def test_hooks_of_a_gradient_are_the_hooks_of_autograd() -> None:
    param, called = torch.nn.Parameter(torch.ones(2)), []
    assert private.gradient_hooks(param) == []
    handles = [param.register_post_accumulate_grad_hook(called.append) for _ in range(2)]
    assert private.gradient_hooks(param) == [called.append] * 2
    handles[0].remove()
    param.sum().backward()
    assert len(called) == len(private.gradient_hooks(param)) == 1
