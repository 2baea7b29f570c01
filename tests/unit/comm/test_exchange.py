"""The collectives of an exchange, agreement on a plan, and copies into its buffers."""

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from benchmarks.c10d_counter import CollectiveCounter
from tests.stream_order import Stream, StreamOrder, stream_order
from titan_muon.engine.exchange import agreement
from titan_muon.engine.exchange.agreement import Agreement, PlanReport
from titan_muon.engine.exchange.exchange import BucketBuffers, Collectives, Exchange, wait_all
from titan_muon.engine.faults.faults import Fault
from titan_muon.engine.faults.report import FaultReport
from titan_muon.engine.layout.types import Piece, Segment
from titan_muon.engine.program.phases import Collective, gather_phase
from titan_muon.forecast.fake_world import fake_world
from titan_muon.plugins.clip import clip_grad_norm_

__all__ = ["stream_order"]


def test_empty_parts_of_different_sizes_are_not_sent() -> None:
    """Results among 128 replicas; 100 replicas have no result."""
    splits = [8 * (rank % 3) if rank < 28 else 0 for rank in range(128)]
    with fake_world(128, 1):
        collectives, parts = Collectives(), list(torch.zeros(sum(splits)).split(splits))
        with CollectiveCounter() as counter:
            wait_all(collectives.all_gather_uneven(parts, torch.ones(splits[1]), dist.group.WORLD))
    assert Counter(call.name for call in counter.calls) == {"send": 127, "recv": sum(map(bool, splits)) - 1}
    assert (collectives.traffic.calls, collectives.traffic.bytes_sent) == (1, splits[1] * 4 * 127)


class Copying:
    """Collectives of a group of one rank, in the current stream."""

    def all_gather(self, output: torch.Tensor, splits: Any, input: torch.Tensor, group: Any) -> list[Any]:
        output.copy_(input)
        return []


def test_results_spread_among_replicas_after_the_write(stream_order: StreamOrder) -> None:
    piece = Piece((Segment(0, 0, 2, 1),), (Segment(0, 0, 3, 1),))
    phase = gather_phase({0: [(0, piece)]}, 0, (0,), Collective.ALL_GATHER)
    exchange = Exchange.__new__(Exchange)
    exchange._module, exchange._stream, exchange._replica_groups = torch.cpu, Stream(), {(0,): None}
    exchange.collectives = Copying()
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
