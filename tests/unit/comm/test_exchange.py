"""The collectives of an exchange, agreement on a plan, copies into buffers, and process groups."""

from collections import Counter
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
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from benchmarks.c10d_counter import CollectiveCounter
from tests.stream_order import Stream, StreamOrder
from titan_muon.engine.exchange import agreement
from titan_muon.engine.exchange.agreement import Agreement, PlanReport
from titan_muon.engine.exchange.exchange import BucketBuffers, Collectives, Exchange, wait_all
from titan_muon.engine.faults.faults import Fault
from titan_muon.engine.faults.report import FaultReport
from titan_muon.engine.layout.types import Piece, Segment
from titan_muon.engine.program.phases import Collective, gather_phase
from titan_muon.engine.tensors import process_groups
from titan_muon.engine.tensors.dtensor import from_local
from titan_muon.engine.tensors.process_groups import StateMesh
from titan_muon.forecast.fake_world import Chunks, fake_world
from titan_muon.plugins.clip import clip_grad_norm_


def test_empty_parts_of_different_sizes_are_not_sent() -> None:
    """Results among 128 replicas; 100 replicas have no result."""
    splits = [8 * (rank % 3) if rank < 28 else 0 for rank in range(128)]
    with fake_world(128, 1):
        collectives, parts = Collectives(), list(torch.zeros(sum(splits)).split(splits))
        with CollectiveCounter() as counter:
            wait_all(collectives.all_gather_uneven(parts, torch.ones(splits[1]), dist.group.WORLD))
    assert Counter(call.name for call in counter.calls) == {"send": 127, "recv": sum(map(bool, splits)) - 1}
    assert (collectives.traffic.calls, collectives.traffic.bytes_sent) == (1, splits[1] * 4 * 127)


def test_results_spread_among_replicas_after_the_write(stream_order: StreamOrder) -> None:
    piece = Piece((Segment(0, 0, 2, 1),), (Segment(0, 0, 3, 1),))
    phase = gather_phase({0: [(0, piece)]}, 0, (0,), Collective.ALL_GATHER)
    exchange = Exchange.__new__(Exchange)
    exchange._module, exchange._stream, exchange._replica_groups = torch.cpu, Stream(), {(0,): None}
    exchange.collectives = SimpleNamespace(all_gather=lambda output, splits, input, group: [output.copy_(input)][:0])
    with stream_order:
        buffers = BucketBuffers(*(torch.empty(6) for _ in range(5)), (), {}, {}, {}, None)
        buffers.home.fill_(2.0)
        exchange._spread(phase, buffers, [])
    assert [stream is exchange._stream for stream, _ in stream_order.log] == [False, True]
    assert buffers.shared.tolist() == [2.0] * 6


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("device", "minutes"), [("cuda", 10), ("cpu", 30), ("mps", 30)])
def test_a_group_has_the_timeout_of_the_steps_device(device: str, minutes: int, monkeypatch: Any) -> None:
    """Under cpu:gloo,cuda:nccl, the timeout of gloo is three times the timeout of NCCL. NCCL gets a stream of high
    priority by its options."""
    made: list[Any] = []
    timeouts = {"cuda": timedelta(minutes=10), "cpu": timedelta(minutes=30)}
    monkeypatch.setattr(agreement, "timeout_of", lambda group, kind: timeouts.get(kind))
    monkeypatch.setattr(agreement, "fast_options", lambda *of: of[:2])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)))
    Agreement()._new_group((0, 2), torch.device(device))
    timeout = timedelta(minutes=minutes)
    assert made == [([0, 2], {"timeout": timeout, "pg_options": (device, timeout)})]


@pytest.mark.usefixtures("four_ranks")
def test_a_rank_makes_a_known_group_needed_by_a_second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks make a group together, and the meshes of ranks differ, for example after a parameter was frozen."""
    agreed, made = Agreement(), list[Any]()
    mine, peers = PlanReport(ranks=(0,)), PlanReport(ranks=(1,), groups=((0, 1), (0, 1, 2)))
    monkeypatch.setattr(agreed, "gathered", lambda report: {0: mine, 1: peers})
    monkeypatch.setattr(agreement, "check_reports", lambda reports: None)
    monkeypatch.setattr(agreed, "_new_group", lambda ranks, device: made.append(ranks) or object())
    agreed.open(mine, {(0, 1): dist.group.WORLD}, torch.device("cpu"))
    assert made == [(0, 1), (0, 1, 2)]
    # A later plan makes only new groups.
    agreed.open(mine, {}, torch.device("cpu"))
    assert made == [(0, 1), (0, 1, 2)]


class NoWaits(TorchFunctionMode):
    """Refuses copies to the meta device that would block the host on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        makes = func is torch.tensor and torch.device(options.get("device", "cpu")).type != "cpu"
        assert not makes, "torch.tensor copies with a wait"
        assert func is not torch.Tensor.to or options.get("non_blocking"), "Tensor.to copies with a wait"
        return func(*args, **options)


def clip() -> None:
    parameter = Parameter(torch.empty(4, 4, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    clip_grad_norm_([parameter], 1.0)


def report_a_fault() -> None:
    FaultReport.add(SimpleNamespace(_faults=torch.zeros(2, device="meta")), [Fault.NONE, Fault.NO_GRADIENT])


@pytest.mark.parametrize("act", [clip, report_a_fault])
def test_the_host_does_not_wait_for_a_copy(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pinned memory needs a device.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with NoWaits():
        act()


# PyTorch's private names for process groups and meshes exist and work

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


def test_an_operator_keeps_a_mesh_without_groups_after_the_same_operator_on_equal_ranks() -> None:
    with fake_world(2):
        whole, piece = torch.empty(4, 3, device="meta"), torch.ones(2, 3)
        plain = from_local(piece, init_device_mesh("cpu", (2,)), [Shard(0)], whole)
        kept = from_local(piece, StateMesh("cpu", torch.arange(2)), [Shard(0)], whole)
        assert torch.zeros_like(plain).device_mesh is plain.device_mesh
        assert torch.zeros_like(kept).device_mesh is kept.device_mesh
