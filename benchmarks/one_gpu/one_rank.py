"""The step of one rank of a large world on one GPU, beside the planner's times: host, device, launches, and memory.

    python -m benchmarks.one_gpu.one_rank --world qwen3_8b --device cuda --json rank.json

The rank is the slowest of the modelled step. PyTorch's fake process group plays the other ranks, and noise is copied to
where their pieces would arrive, so that waits for links are absent. `--device cpu` steps a tiny world, and plans the
named one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.one_gpu.worlds import Row, World, placement_of, read
from titan_muon import Expert, Muon
from titan_muon.adam import AdamW
from titan_muon.algorithms.fused import usable
from titan_muon.comm.clip import NormCheck
from titan_muon.comm.exchange import Collectives
from titan_muon.engine import plan_step
from titan_muon.options import Machine, MuonOptions, Split
from titan_muon.plan import Plan, summarize
from titan_muon.plan.cost.timeline import timeline
from titan_muon.step.rank import dispatch_of, planning_machine

NOISE = 1e-3
"""Size of received numbers: a larger one would break the bound on updates."""
FASTER = 0.98
"""Largest ratio of two times that counts as faster."""
GIB = 2**30
KERNELS = 40
"""Most kernels in the details."""
MACHINES = {"H200": "h200x8", "H100": "h100x8", "B200": "b200x8"}
"""The planner's machine by a part of the GPU's name."""

Named = list[tuple[str, nn.Parameter]]


class Noise(Collectives):
    """Collectives of a world with a single real rank: noise arrives, in the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self._noise: dict[torch.dtype, Tensor] = {}

    def all_to_all(
        self,
        output: Tensor,
        output_splits: Sequence[int],
        input: Tensor,
        input_splits: Sequence[int],
        group: dist.ProcessGroup,
    ) -> list[dist.Work]:
        """Fill `output`. Returns no handle, because the copy is in the current stream."""
        received = output[: sum(output_splits)]
        self.traffic.add(sum(input_splits) * input.element_size())
        self.received += received.nbytes
        noise = self._noise.get(output.dtype)
        if noise is None or noise.numel() < received.numel():
            noise = torch.randn(received.numel(), device=output.device).mul_(NOISE).to(output.dtype)
            self._noise[output.dtype] = noise
        received.copy_(noise[: received.numel()])
        return []


class OneRankMuon(Muon):
    """Muon in a world with a single real rank."""

    transport = Noise


@dataclass(frozen=True)
class Clock:
    """Times of calls on a device. On the CPU, host and device are one."""

    device: torch.device

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of the host and of the device."""
        self.wait()
        begin = time.perf_counter()
        if self.device.type != "cuda":
            run()
            return (milliseconds := 1e3 * (time.perf_counter() - begin)), milliseconds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        host = time.perf_counter() - begin
        self.wait()
        return 1e3 * host, start.elapsed_time(end)

    def medians(self, run: Callable[[], object], repeats: int) -> dict[str, float]:
        """Medians of single calls, and the mean of calls back to back, in which the host is ahead."""
        times = [self.once(run) for _ in range(repeats)]
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        together = 1e3 * (time.perf_counter() - begin) / repeats
        host, device = (median(column) for column in zip(*times, strict=True))
        return {"device ms": device, "host ms": host, "back to back ms": together}


@contextlib.contextmanager
def fake_world(world: World) -> Iterator[None]:
    """Process group of the world's slowest rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_parameters(world: World, optimizer: str) -> list[tuple[str, Tensor, Mapping[str, Any]]]:
    """Names, parameters without memory, and options of their groups."""
    meshes, named = world.device_meshes("cpu"), []
    for row in (row for row in world.rows if row.optimizer == optimizer):
        tensor: Tensor = torch.empty(row.shape, device="meta")
        if row.mesh is not None:
            placements, stride = list(map(placement_of, row.placements)), tensor.stride()
            local, size = torch.empty(0, device="meta"), tensor.shape
            tensor = DTensor.from_local(local, meshes[row.mesh], placements, run_check=False, shape=size, stride=stride)
        named.append((row.fqn, tensor, world.groups[optimizer][row.group]))
    return named


def plan_of(world: World) -> Plan:
    """The plan of a recipe for GPUs, without the memory of the parameters."""
    named = meta_parameters(world, "muon")
    options = MuonOptions(split=splits_of(world))
    dispatch, groups = dispatch_of(torch.device("cuda"), options), [group for _, _, group in named]
    return plan_step([(fqn, tensor) for fqn, tensor, _ in named], groups, dispatch, options)


def splits_of(world: World) -> tuple[Split, ...]:
    """The splits of a world."""
    return tuple(Split(**fields) for fields in world.splits)


def groups_of(world: World, optimizer: str, device: torch.device) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer with random shards and gradients of this rank."""
    meshes = world.device_meshes(device.type)
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in world.groups[optimizer]]
    for row in (row for row in world.rows if row.optimizer == optimizer):
        parameter = nn.Parameter(_filled(row, meshes, device, 0.02))
        parameter.grad = _filled(row, meshes, device, NOISE)
        groups[row.group]["params"].append((row.fqn, parameter))
    return [group for group in groups if group["params"]]


def _filled(row: Row, meshes: Sequence[dist.device_mesh.DeviceMesh], device: torch.device, size: float) -> Tensor:
    if row.mesh is None:
        return torch.randn(row.shape, device=device).mul_(size)
    placements = list(map(placement_of, row.placements))
    tensor = empty_dtensor(row.shape, device_mesh=meshes[row.mesh], placements=placements)
    tensor.to_local().normal_(std=size)
    return tensor


def modelled(plan: Plan, rank: int, gpu: str) -> dict[str, Any]:
    """Row of the planner's times for a rank, on the machine of a GPU's name."""
    name: Any = next((machine for part, machine in MACHINES.items() if part in gpu), "auto")
    rates = planning_machine(Machine(name=name), "cuda")
    seconds = next(item for item in timeline(plan, rates).ranks if item.rank == rank)
    cost = next(item for item in summarize(plan).ranks if item.rank == rank)
    return {
        "source": "model",
        "step": rates.name,
        "device ms": 1e3 * (seconds.orthogonalize + seconds.passes),
        "host ms": 1e3 * seconds.host,
        "newton_schulz ms": 1e3 * seconds.orthogonalize,
        "passes ms": 1e3 * seconds.passes,
        "waits ms": 1e3 * seconds.waits,
        "temporary GiB": (cost.buffer_bytes + cost.work_bytes) / GIB,
    }


class Rank:
    """The optimizers of one rank of a world on a device."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device, self.clock = world, device, Clock(device)
        self._groups = groups_of(world, "muon", device)
        others = groups_of(world, "adamw", device)
        others = [{**g, "betas": tuple(g["betas"]), "params": [p for _, p in g["params"]]} for g in others]
        self.adamw = AdamW(others, foreach=device.type != "cuda", fused=device.type == "cuda")
        self._finite = torch.ones((), device=device)

    def muon(self, *, fused: bool) -> Muon:
        """Muon with a built plan."""
        groups = [dict(group) for group in self._groups]
        return OneRankMuon(groups, split=splits_of(self.world), expert=Expert(fused=fused)).build()

    def recipe_step(self, muon: Muon) -> None:
        """A step as recipes take it: the device may undo it after a non-finite norm."""
        muon.skip_unless_finite(NormCheck(self._finite, (), torch.zeros(0)))
        muon.step()

    def measured(self, muon: Muon, step: Callable[[], object], repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Times, launches and memory of a step, and the details of its kernels."""
        for _ in range(3):
            step()
        self.clock.wait()
        memory = Memory(self.device)
        times = self.clock.medians(step, repeats)
        figures = {**times, **memory.figures(2 * repeats)}
        launches, stages, kernels = traced(step, self.device)
        stage_ms = {
            "newton_schulz ms": stages.get("orthogonalize", 0.0),
            "passes ms": stages.get("advance", 0.0) + stages.get("apply", 0.0),
        }
        # Last, because a step that raises is left half done.
        row = {**figures, "launches": launches, **stage_ms, **self._waits(step)}
        return row, {"stages ms": stages, "kernels": kernels}

    def _waits(self, step: Callable[[], object]) -> dict[str, Any]:
        if self.device.type != "cuda":
            return {}
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            return {"host waits": str(error)[:100]}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"host waits": "no"}


class Memory:
    """Memory of a GPU since construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held, self._before = torch.cuda.memory_allocated(device), torch.cuda.memory_stats(device)

    def figures(self, steps: int) -> dict[str, Any]:
        """Memory beyond the tensors at rest, reserved memory, and allocations per step; empty on the CPU."""
        if self.device.type != "cuda":
            return {}
        after = torch.cuda.memory_stats(self.device)
        keys = ("num_device_alloc", "num_alloc_retries", "allocation.all.allocated")
        # Some allocators do not count everything.
        made = {key: after.get(key, 0) - self._before.get(key, 0) for key in keys}
        return {
            "held GiB": self._held / GIB,
            "temporary GiB": (torch.cuda.max_memory_allocated(self.device) - self._held) / GIB,
            "reserved GiB": torch.cuda.max_memory_reserved(self.device) / GIB,
            "allocations": made["allocation.all.allocated"] // steps,
            "cudaMallocs": made["num_device_alloc"],
            "retries": made["num_alloc_retries"],
        }


def traced(step: Callable[[], object], device: torch.device) -> tuple[int, dict[str, float], list[list[Any]]]:
    """Launches of a step (operators on the CPU), milliseconds by stage, and the kernels with most time."""
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as profiler:
        step()
        Clock(device).wait()
    stages: dict[str, float] = {}
    kernels: dict[str, list[Any]] = {}
    kind = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    for event in profiler.events():
        if event.name.startswith("Muon."):
            stage = event.name.removeprefix("Muon.").split()[0]
            # A GPU's range is listed a second time, as an annotation of the device.
            if event.device_type == torch.autograd.DeviceType.CPU:
                spent = event.device_time_total if is_gpu else event.cpu_time_total
                stages[stage] = stages.get(stage, 0.0) + spent / 1e3
        elif event.device_type == kind and (is_gpu or event.name.startswith("aten::")):
            count, spent = kernels.get(event.name[:110], [0, 0.0])
            kernels[event.name[:110]] = [count + 1, spent + (event.device_time if is_gpu else event.cpu_time) / 1e3]
    table = sorted(([name, *values] for name, values in kernels.items()), key=lambda row: -row[2])
    return sum(row[1] for row in table), stages, table[:KERNELS]


def fused_is_faster(milliseconds: Mapping[str, float]) -> bool:
    """Whether `fused` shortens the plain and the recipe's step, from the times of all four."""
    pairs = (("fused", "plain"), ("recipe, fused", "recipe"))
    return all(milliseconds[fused] < FASTER * milliseconds[foreach] for fused, foreach in pairs)


def steps(rank: Rank, gpu: str, source: str, repeats: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure every kind of step, and save the figures after each."""
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    figures: dict[str, Any] = {"rows": rows, "details": details, "fused_is_faster": None}
    # With `fused`, a step may be undone too, so that the steps of recipes are compared.
    variants = {
        "plain": False,
        "recipe": False,
        **({"fused": True, "recipe, fused": True} if usable(rank.device.type) else {}),
    }
    muon, built = None, None
    for name, fused in variants.items():
        if built != fused:
            muon = None
            begin = time.perf_counter()
            muon, built = rank.muon(fused=fused), fused
            figures["build s" + (", fused" if fused else "")] = time.perf_counter() - begin
        assert muon is not None, "the first variant builds one"
        if not rows:
            rows.append(modelled(muon.plan, rank.world.rank, gpu))
        step = (lambda m=muon: rank.recipe_step(m)) if "recipe" in name else muon.step
        row, details[name] = rank.measured(muon, step, repeats)
        built = None if row.get("host waits", "no") != "no" else fused
        share = {"of model": row["device ms"] / rows[0]["device ms"]} if source == "measured" else {}
        rows.append({"source": source, "step": name, **row, **share})
        save(figures)
    for _ in range(3):
        rank.adamw.step()
    rows.append({"source": source, "step": "AdamW of the rest", **rank.clock.medians(rank.adamw.step, repeats)})
    by_step = {row["step"]: row["device ms"] for row in rows}
    if "recipe, fused" in by_step and source == "measured":
        figures["fused_is_faster"] = fused_is_faster(by_step)
    save(figures)


def main(words: Sequence[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", required=True, help="a name in worlds.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    world, device = read(options.world), torch.device(options.device)
    is_gpu = device.type == "cuda"
    rehearsed: list[dict[str, Any]] = []

    def save(figures: dict[str, Any]) -> None:
        document = {"world": options.world, "ranks": world.size, "rank": world.rank, **figures}
        document["rows"] = [*rehearsed, *figures["rows"][len(rehearsed) and 1 :]]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    torch.manual_seed(0)
    if not is_gpu:
        with fake_world(world):
            rehearsed.append(modelled(plan_of(world), world.rank, ""))
    stepped = world if is_gpu else read("tiny")
    with fake_world(stepped):
        gpu = torch.cuda.get_device_name(device) if is_gpu else ""
        source = "measured" if is_gpu else "rehearsed, tiny"
        steps(Rank(stepped, device), gpu, source, options.repeats, save)
    for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
