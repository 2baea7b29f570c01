"""The private parts of FSDP2 are there and do what sums over replicas and updates in forward need of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.c10d_counter import CollectiveCounter
from tests.stream_order import StreamOrder, stream_order
from titan_muon.fsdp.private import HSDPGroup, hsdp_groups, own_groups, prefetched_groups

__all__ = ["stream_order"]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four; nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded(*shape: int) -> nn.Sequential:
    """Two layers, one module of FSDP2; 7 rows of the first are cut into 4 and 3 where there are two shards."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    net = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 2))
    fully_shard(net, mesh=mesh)
    net.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return net


def group_of(net: nn.Sequential) -> HSDPGroup:
    (group,) = hsdp_groups(net)  # type: ignore[arg-type]
    return group


@pytest.mark.usefixtures("four_ranks")
def test_modules_without_replicas_have_no_such_groups() -> None:
    assert list(hsdp_groups(sharded(4))) == []  # type: ignore[arg-type]
    assert len(list(hsdp_groups(sharded(2, 2)))) == 1  # type: ignore[arg-type]


@pytest.mark.usefixtures("four_ranks")
def test_gradients_are_in_the_order_of_parameters_and_padded() -> None:
    net = sharded(2, 2)
    net[1].weight.requires_grad_(False)
    found = list(group_of(net).trained())
    assert [each.param for each in found] == [net[0].weight, net[1].bias]
    assert [(each.elements, each.padded) for each in found] == [(20, 20), (1, 1)]
    assert group_of(net).replicate_group.size() == 2


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("reshards", [True, False])
def test_the_hook_takes_the_place_of_the_all_reduce_and_gets_all_gradients(reshards: bool) -> None:
    net, seen = sharded(2, 2), list[Tensor]()
    net.set_reshard_after_forward(reshards)  # type: ignore[operator]
    group = group_of(net)
    group.replace_all_reduce(lambda flat: seen.append(flat.fill_(3.0)))
    assert list(hsdp_groups(net)) == []  # type: ignore[arg-type]
    with CollectiveCounter() as counter:
        net(torch.ones(1, 5)).sum().backward()
    names = [call.name for call in counter.calls]
    assert "allreduce" not in names
    assert names.count("reduce_scatter_base") == 1
    assert [flat.numel() for flat in seen] == [sum(each.padded for each in group.trained())]
    # Divided behind it, by the ranks of one replica.
    assert all((param.grad.to_local() == 1.5).all() for param in net.parameters())  # type: ignore[union-attr]


@pytest.mark.usefixtures("four_ranks")
def test_what_is_held_is_there_until_backward_is_over() -> None:
    """Gradients in float32 of weights in bfloat16, which FSDP2 would drop behind the hook."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).bfloat16()
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    flats: list[StorageWeakRef] = []
    alive: list[bool] = []
    for module in net:
        (group,) = hsdp_groups(module)  # type: ignore[arg-type]

        def hook(flat: Tensor, group: HSDPGroup = group) -> None:
            alive.extend(not flat.expired() for flat in flats)
            flats.append(StorageWeakRef(flat.untyped_storage()))
            group.hold(flat)

        group.replace_all_reduce(hook)
    net(torch.ones(1, 5).bfloat16()).sum().backward()
    assert (alive, len(flats)) == ([True], 2)
    assert all(flat.expired() for flat in flats)


@pytest.mark.usefixtures("four_ranks")
def test_a_module_is_sharded_between_forward_and_backward_as_before() -> None:
    """And not on another mesh, which FSDP2 would take the new one of the module for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    sharded = net[0].weight
    (group,) = hsdp_groups(net[0])  # type: ignore[arg-type]
    group.replace_all_reduce(lambda flat: None)
    net(torch.ones(1, 5))
    assert net[0].weight is sharded


@pytest.mark.usefixtures("four_ranks")
def test_settings_are_read_as_they_are_made() -> None:
    net = sharded(2, 2)
    group = group_of(net)
    assert not group.has_divide_factor
    assert group.all_reduces
    net.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    net.set_requires_all_reduce(False)  # type: ignore[operator]
    assert group.has_divide_factor
    assert not group.all_reduces
    net.set_all_reduce_hook(lambda flat: None)  # type: ignore[operator]
    with pytest.raises(ValueError, match="set_all_reduce_hook has been called"):
        group.replace_all_reduce(lambda flat: None)


@pytest.mark.usefixtures("four_ranks")
def test_groups_tell_what_a_forward_gathers_and_when() -> None:
    mesh = init_device_mesh("cpu", (4,))
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    first, second = (fully_shard(module, mesh=mesh) for module in net)
    fully_shard(net, mesh=mesh)
    ((one,), (other,)), root = (own_groups(module) for module in (first, second)), own_groups(net)  # type: ignore[arg-type]
    assert one.params() == [net[0].weight]
    assert other.params() == [net[1].weight]
    assert not any(group.params() for group in root)
    first.set_modules_to_forward_prefetch([second])
    (ahead,) = prefetched_groups(first)
    assert ahead.params() == other.params()
    assert not prefetched_groups(second)
    seen = []
    net[0].register_forward_pre_hook(lambda *_: seen.append((one.is_gathered, other.is_gathered)))
    net[1].register_forward_hook(lambda *_: seen.append((one.is_gathered, other.is_gathered)))
    assert not one.is_gathered
    net(torch.ones(1, 8))
    assert seen == [(True, True), (False, False)], "the second is prefetched, and each is resharded behind its forward"
    second.unshard()
    assert (one.is_gathered, other.is_gathered) == (False, True)
    assert one.params() == [net[0].weight], "sharded parameters, whatever the module has now"


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["shards", "copies"])
def test_weights_are_read_on_the_stream_of_the_copy_in(
    four_ranks: None, shape: tuple[int, ...], stream_order: StreamOrder
) -> None:
    """Or on the computing one, before FSDP2 has others, and where nothing is gathered."""
    net = nn.Linear(8, 8)
    fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]))
    (group,) = own_groups(net)  # type: ignore[arg-type]
    assert group.reading_stream() is group.computing_stream() is stream_order.compute
    with stream_order:
        net(torch.ones(1, 8))
        net(torch.ones(1, 8))
    copies = ("fsdp::all_gather_copy_in", "aten::copy_")
    (read,) = {stream for stream, name in stream_order.log if name in copies}
    assert group.reading_stream() is read
    assert (read is stream_order.compute) == (shape == (4, 1))
