"""PyTorch's private names for process groups and meshes exist and work."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard

from titan_muon.engine.tensors import process_groups
from titan_muon.engine.tensors.dtensor import from_local
from titan_muon.engine.tensors.process_groups import StateMesh
from titan_muon.forecast.fake_world import Chunks, fake_world

MINUTE = timedelta(seconds=60)


@pytest.mark.usefixtures("world_of_one")
def test_timeouts_and_backends_are_read_by_device() -> None:
    assert process_groups.timeout_of(dist.group.WORLD, "cpu") == MINUTE
    assert process_groups.timeout_of(dist.group.WORLD, "xpu") is None
    assert process_groups.backends()["cpu"] == "gloo"
    assert process_groups.fast_options("cpu", MINUTE) is None


@pytest.fixture(params=["nccl", "nccl2"])
def nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of four ranks with NCCL; a CPU build of PyTorch simulates NCCL's options."""
    if not dist.is_nccl_available():
        options = SimpleNamespace(Options=lambda **values: SimpleNamespace(**values, _timeout=10 * MINUTE))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: f"cpu:gloo,cuda:{request.param}")


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("timeout", [None, MINUTE])
def test_options_of_nccl_have_a_stream_of_high_priority_and_the_timeout(timeout: timedelta | None) -> None:
    options: Any = process_groups.fast_options("cuda", timeout)
    assert options.is_high_priority_stream
    assert options._timeout == (timeout or 10 * MINUTE), "new_group warns of another timeout"
    assert process_groups.fast_options("cpu", timeout) is None


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (5, 3), (683, 1), (684, 0), (1023, 0)])
def test_a_fake_world_makes_the_groups_and_chunks_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, rows: int
) -> None:
    """A mesh has a group for each rank, and FSDP2 asks for a chunk for each rank of each parameter."""
    asked = list[int]()
    chunk_of = Chunks.__getitem__
    monkeypatch.setattr(
        Chunks, "__getitem__", lambda chunks, number: (asked.append(number), chunk_of(chunks, number))[1]
    )
    with fake_world(1024, rank):
        mesh = init_device_mesh("cpu", (1024, 1), mesh_dim_names=("fsdp", "tp"))
        assert process_groups.group_count() <= 3
        with torch.device("meta"):
            linear = fully_shard(nn.Linear(4, 2050, bias=False), mesh=mesh["fsdp"])
        assert linear.weight.to_local().shape == (rows, 4)
        assert linear.weight.shape == (2050, 4)
    assert set(asked) <= {0, rank}


def test_the_chunks_of_a_rank_are_those_of_fsdp2() -> None:
    chunk_with_empty = _fsdp_param._chunk_with_empty
    for rows, count, dim in ((7, 3, 0), (3, 7, 0), (0, 3, 0), (8, 4, 1)):
        tensor = torch.arange(8 * rows).view(rows, 8)
        chunks = Chunks(tensor, count, dim)
        for rank, theirs in enumerate(chunk_with_empty(tensor, count, dim)):
            assert torch.equal(chunks[rank], theirs)
    with fake_world(2):
        assert _fsdp_param._chunk_with_empty is Chunks
    assert _fsdp_param._chunk_with_empty is chunk_with_empty


# Meshes without process groups


def test_an_operator_keeps_a_mesh_without_groups_after_the_same_operator_on_equal_ranks() -> None:
    with fake_world(2):
        whole, piece = torch.empty(4, 3, device="meta"), torch.ones(2, 3)
        plain = from_local(piece, init_device_mesh("cpu", (2,)), [Shard(0)], whole)
        kept = from_local(piece, StateMesh("cpu", torch.arange(2)), [Shard(0)], whole)
        assert torch.zeros_like(plain).device_mesh is plain.device_mesh
        assert torch.zeros_like(kept).device_mesh is kept.device_mesh
