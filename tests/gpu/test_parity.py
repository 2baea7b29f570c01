"""The checks for GPU ranks pass on the CPU and on fake GPUs, and notice faults."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from benchmarks.gpu import ranks
from benchmarks.rehearsal.fake_gpu import DeviceSync, fake_gpu, fake_rank
from tests.dist.harness import run_ranks
from tests.gpu import parity
from tests.gpu.devices import needs_cuda_build
from titan_muon import Muon
from titan_muon.engine import Engine
from titan_muon.step.step import MuonStep

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def faults_on_cpu(rank: int, world_size: int) -> list[str]:
    checks = list(parity.checks(CPU))
    assert len(checks) == len(parity.EXCHANGES) + 5
    return [f"{check.name}: {fault}" for check in checks for fault in check.faults]


def test_every_check_passes_on_two_ranks_of_the_cpu() -> None:
    assert run_ranks(faults_on_cpu, 2) == [[], []]


def interrupted(rank: int, world_size: int, file: str) -> list[str]:
    def checks(device: torch.device) -> Iterator[parity.Check]:
        yield parity.Check("first", 0.0)
        raise RuntimeError("second")

    parity.begin, parity.checks = (lambda device: CPU), checks  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="second"):
        parity.main(["--device", "cpu", "--json", file])
    dist.barrier()
    return [row["name"] for row in json.loads(Path(file).read_text())["checks"]]


def test_checks_before_a_crash_are_kept(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, str(tmp_path / "parity.json")) == [["first"], ["first"]]


def gathered_through_the_host(rank: int, world_size: int) -> list[bool]:
    DTensor.full_tensor = ranks.full_through_the_host
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    placements: list[tuple[Placement, ...]] = [(Shard(1),), (Replicate(), Shard(0))]
    full = torch.arange(45.0).view(9, 5)
    placed = [distribute_tensor(full, mesh, where) for mesh, where in zip(meshes, placements, strict=True)]
    return [torch.equal(tensor.full_tensor(), full) for tensor in placed]


def test_ranks_that_share_a_gpu_gather_whole_tensors_on_the_host() -> None:
    assert run_ranks(gathered_through_the_host, 4) == [[True, True]] * 4


@needs_cuda_build
@pytest.mark.parametrize(("rank", "world", "exchanges"), [(0, 1, ("all_to_all",)), (5, 8, parity.EXCHANGES)])
def test_every_exchange_steps_on_fake_gpus_without_a_sync(rank: int, world: int, exchanges: tuple[str, ...]) -> None:
    with fake_gpu(), fake_rank(world, rank):
        for exchange in exchanges:
            assert parity.check_exchange(exchange, parity.FLOAT32, CUDA, has_values=False).faults == ()


@needs_cuda_build
def test_a_sync_in_a_step_on_fake_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Engine.run

    def waiting(engine: Engine, *args: Any) -> None:
        run(engine, *args)
        torch.ones(1, device="cuda").item()

    monkeypatch.setattr(Engine, "run", waiting)
    with fake_gpu(), fake_rank(2, 0), pytest.raises(DeviceSync):
        parity.check_exchange("all_to_all", parity.FLOAT32, CUDA, has_values=False)


def faults_of_a_lost_update(rank: int, world_size: int) -> tuple[str, ...]:
    bucket = MuonStep.bucket

    def lost(step: MuonStep, views: Any, gradients: Any, **options: Any) -> Any:
        return bucket(step, replace(views, updates=()) if rank == 1 else views, gradients, **options)

    MuonStep.bucket = lost  # type: ignore[method-assign]
    return parity.check_exchange("all_to_all", parity.FLOAT32, CPU).faults


def test_a_lost_update_is_a_fault_on_the_losing_rank() -> None:
    first, second = run_ranks(faults_of_a_lost_update, 2)
    assert first == ()
    assert any("FSDP: wide: off by 1" in fault for fault in second)


@pytest.mark.parametrize(
    ("name", "private", "is_open"), [("nccl", False, True), ("nccl", True, False), ("gloo", False, False)]
)
def test_groups_of_nccl_are_open_with_or_without_the_private_name(
    monkeypatch: pytest.MonkeyPatch, name: str, private: bool, is_open: bool
) -> None:
    """Backends of torch 2.15 connect new groups at once, and have no such name."""
    closed = SimpleNamespace(_is_initialized=lambda: False) if private else SimpleNamespace()
    monkeypatch.setattr(dist, "get_backend", lambda group: name)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    assert ranks._is_open(SimpleNamespace(_get_backend=lambda device: closed)) == is_open  # type: ignore[arg-type]


def test_more_memory_than_planned_is_a_fault() -> None:
    assert run_ranks(faults_of_hoarding, 2) == [True, True]


def faults_of_hoarding(rank: int, world_size: int) -> bool:
    step = Muon.step

    def hoarding(optimizer: Muon) -> None:
        hoard = nn.Parameter(torch.ones(1_000_000))
        step(optimizer)
        del hoard

    Muon.step = hoarding  # type: ignore[method-assign, assignment]
    return any("bytes, and the plan says" in fault for fault in parity.check_memory(CPU).faults)
