"""FSDP2's private names for updates in forward exist and work."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.stream_order import StreamOrder, stream_order
from titan_muon.features.private import own_groups, prefetched_groups

__all__ = ["stream_order"]


@pytest.mark.usefixtures("four_ranks")
def test_groups_know_the_gathers_of_a_forward_and_the_order() -> None:
    mesh = init_device_mesh("cpu", (4,))
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    first, second = (fully_shard(module, mesh=mesh) for module in net)
    fully_shard(net, mesh=mesh)
    ((leading,), (other,)), root = (own_groups(module) for module in (first, second)), own_groups(net)  # type: ignore[arg-type]
    assert leading.params() == [net[0].weight]
    assert other.params() == [net[1].weight]
    assert not any(group.params() for group in root)
    first.set_modules_to_forward_prefetch([second])
    (ahead,) = prefetched_groups(first)
    assert ahead.params() == other.params()
    assert not prefetched_groups(second)
    seen = []
    net[0].register_forward_pre_hook(lambda *_: seen.append((leading.is_gathered, other.is_gathered)))
    net[1].register_forward_hook(lambda *_: seen.append((leading.is_gathered, other.is_gathered)))
    assert not leading.is_gathered
    net(torch.ones(1, 8))
    assert seen == [(True, True), (False, False)], "the second is prefetched, and each is resharded behind its forward"
    second.unshard()
    assert (leading.is_gathered, other.is_gathered) == (False, True)
    assert leading.params() == [net[0].weight], "sharded parameters, whatever the module has now"


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["shards", "copies"])
def test_weights_are_read_on_the_stream_of_the_copy_in(
    four_ranks: None, shape: tuple[int, ...], stream_order: StreamOrder
) -> None:
    """Or on the compute stream, before FSDP2 has streams and without a gather."""
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
