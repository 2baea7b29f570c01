"""PyTorch's private names for process groups exist and work."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_muon.engine.exchange.agreement import Agreement, PlanReport
from titan_muon.engine.tensors import process_groups
from titan_muon.engine.tensors.process_groups import fake_world

MINUTE = timedelta(seconds=60)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """The default process group of a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=MINUTE)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_timeout_is_read_and_set(gloo: dist.ProcessGroup) -> None:
    assert process_groups.timeout_of(gloo, "cpu") == MINUTE
    assert process_groups.timeout_of(gloo, "xpu") is None
    process_groups.set_timeout(2 * MINUTE, gloo)
    assert process_groups.timeout_of(gloo, "cpu") == 2 * MINUTE


def test_backends_are_listed_by_device(gloo: dist.ProcessGroup) -> None:
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


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nccl_groups_of_muon_have_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    made: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: list[int], *, pg_options: Any, **_: object) -> dist.ProcessGroup | None:
        made[tuple(ranks)] = pg_options
        return dist.group.WORLD

    with fake_world(4):
        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(Agreement, "_warm_up", lambda *_: None)
        report = PlanReport((0, 1, 2, 3), groups=((0, 1), (0, 2), (2, 3)))
        Agreement().open(report, {}, torch.device(device))
    assert made.keys() == {(0, 1), (2, 3), (0, 2)}
    for options in made.values():
        assert options.is_high_priority_stream if device == "cuda" else options is None
