"""The step of one rank of a large world on one GPU, beside the planner's times: host, kernels by stage, idle, memory.

`python -m benchmarks.gpu --call 1` runs it. The rank is the slowest of the modelled step. PyTorch's fake process group
plays the other ranks, and noise is copied to where their pieces would arrive, so that waits for links are absent. A
rehearsal on the CPU steps a tiny world, and plans the named one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu import Rows
from benchmarks.gpu.launches import Clock
from benchmarks.one_gpu.worlds import Row, World, placement_of, read
from titan_muon import Expert, Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.engine import plan_step
from titan_muon.engine.exchange.exchange import Collectives
from titan_muon.engine.layout.types import Plan
from titan_muon.forecast.fake_world import forget_meshes
from titan_muon.options import Machine, MuonOptions, Split
from titan_muon.planner.machine import planning_machine
from titan_muon.planner.summary import summarize
from titan_muon.planner.timeline import timeline
from titan_muon.plugins.clip import NormCheck
from titan_muon.selection import select

NOISE = 1e-3
"""Size of received numbers: a larger one would break the bound on updates."""
LOST = 0.01
"""Largest share of the kernels' time without a stage."""
COLUMNS = 16
"""Columns of narrow tensors: enough for vector accesses."""
REPEATS = {"cuda": 6, "cpu": 2}
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
    groups, tensors = [group for _, _, group in named], [tensor for _, tensor, _ in named]
    selected = select(options, groups, tensors, torch.device("cuda"))
    return plan_step([(fqn, tensor) for fqn, tensor, _ in named], groups, selected)


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
        "step": f"model of {rates.name}",
        "device ms": 1e3 * (seconds.orthogonalize + seconds.passes),
        "host ms": 1e3 * seconds.host,
        "newton_schulz ms": 1e3 * seconds.orthogonalize,
        "passes ms": 1e3 * seconds.passes,
        "waits ms": 1e3 * seconds.waits,
        "temporary GiB": (cost.buffer_bytes + cost.work_bytes) / GIB,
    }


class Rank:
    """The optimizers of one rank of a world on a device, with two sets of gradients.

    `narrow`: every tensor has few columns, so that a step has launches but no work, and no launch waits for a place in
    the device's queue.
    """

    def __init__(self, world: World, device: torch.device, *, narrow: bool = False) -> None:
        if narrow:
            world = replace(world, rows=tuple(map(narrowed, world.rows)))
        self.world, self.device, self.clock = world, device, Clock(device)
        self._groups = groups_of(world, "muon", device)
        self._finite = torch.ones((), device=device)
        self._params = [p for group in self._groups for _, p in group["params"]]
        self._gradients = [[p.grad for p in self._params], [torch.empty_like(p).copy_(p.grad) for p in self._params]]

    def time_adamw(self) -> dict[str, float]:
        """Times of the other optimizer of the recipe, for the rest of the parameters."""
        groups = groups_of(self.world, "adamw", self.device)
        groups = [{**g, "betas": tuple(g["betas"]), "params": [p for _, p in g["params"]]} for g in groups]
        adamw = AdamW(groups, foreach=not self.clock.is_gpu, fused=self.clock.is_gpu)
        for _ in range(3):
            adamw.step()
        return self.clock.once(adamw.step)

    def muon(self, *, fused: bool, captured: bool = False) -> Muon:
        """Muon with a built plan. `captured`: a step is a CUDA graph."""
        groups, expert = [dict(group) for group in self._groups], Expert(fused=fused, cuda_graph=captured)
        return OneRankMuon(groups, split=splits_of(self.world), expert=expert).build()

    def set_gradients(self, step: int, *, new: bool) -> None:
        """Constant gradients, or tensors at other addresses than in the step before, as FSDP2 makes them."""
        for param, gradient in zip(self._params, self._gradients[step % 2 if new else 0], strict=True):
            param.grad = gradient.detach() if new else gradient

    def step_of(self, muon: Muon, *, skippable: bool) -> Callable[[], object]:
        """A step. A skippable one may be undone by the device after a norm that is not finite."""
        if not skippable:
            return muon.step

        def step() -> None:
            muon.skip_unless_finite(NormCheck(self._finite, (), torch.zeros(0)))
            muon.step()

        return step

    def measured(
        self, repeats: int, *, fused: bool, skippable: bool, new: bool, captured: bool = False
    ) -> dict[str, Any]:
        """Columns of a step: medians of the times, kernels by stage, idle, launches, and memory."""
        step = self.step_of(self.muon(fused=fused, captured=captured), skippable=skippable)
        # The fourth step is captured.
        for number in range(4):
            self.set_gradients(number, new=new)
            step()
        self.clock.wait()
        memory, times = Memory(self.device), []
        for number in range(repeats):
            self.set_gradients(number, new=new)
            times.append(self.clock.once(step))
        columns: dict[str, Any] = {name: median(item[name] for item in times) for name in times[0]}
        columns.update(memory.figures(repeats))
        try:
            trace = traced(step, self.clock)
        except AssertionError as fault:
            # The times hold nevertheless.
            return {**columns, "error": str(fault)}
        idle = columns["device ms"] - trace.total
        # A plan of narrow tensors has fewer buckets, so that its host time counts by launch.
        columns["host us a launch"] = 1e3 * columns["host ms"] / trace.launches
        stages = {f"{stage} ms": spent for stage, spent in trace.stages.items()}
        return {**columns, "kernels ms": trace.total, "idle ms": idle, "launches": trace.launches, **stages,
                "kernels": trace.table()}  # fmt: skip


def narrowed(row: Row) -> Row:
    """A parameter of the same name with few columns."""
    return replace(row, shape=(*row.shape[:-1], min(row.shape[-1], COLUMNS))) if len(row.shape) > 1 else row


class Memory:
    """Memory of a GPU since construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held, self._before = torch.cuda.memory_allocated(device), torch.cuda.memory_stats(device)

    def figures(self, steps: int) -> dict[str, Any]:
        """Memory at rest and beyond, allocations per step, and calls of the driver in all; empty on the CPU."""
        if self.device.type != "cuda":
            return {}
        after = torch.cuda.memory_stats(self.device)
        # Some allocators do not count everything.
        made, driver = (
            after.get(key, 0) - self._before.get(key, 0) for key in ("allocation.all.allocated", "num_device_alloc")
        )
        peak = torch.cuda.max_memory_allocated(self.device)
        return {
            "held GiB": self._held / GIB,
            "temporary GiB": (peak - self._held) / GIB,
            "allocations": made // steps,
            "cudaMallocs": driver,
        }


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy: name, milliseconds, and the start of its launch on the host in ns, None if unknown."""

    name: str
    spent: float
    launch: int | None


@dataclass(frozen=True)
class Trace:
    """Kernels of a step, and their milliseconds by stage."""

    kernels: tuple[Kernel, ...]
    stages: Mapping[str, float]

    @property
    def total(self) -> float:
        """Milliseconds of all kernels."""
        return sum(kernel.spent for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Number of kernels and copies."""
        return len(self.kernels)

    def table(self) -> list[list[Any]]:
        """Names, counts and milliseconds of the kernels with most time."""
        by_name: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            by_name.setdefault(kernel.name[:110], []).append(kernel)
        spent = {name: sum(kernel.spent for kernel in kernels) for name, kernels in by_name.items()}
        names = sorted(spent, key=lambda name: (-spent[name], name))[:KERNELS]
        return [[name, len(by_name[name]), spent[name]] for name in names]


def traced(step: Callable[[], object], clock: Clock) -> Trace:
    """Trace of a step. On the CPU, operators that no other operator calls are its kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.is_gpu else [])]
    with profile(activities=activities) as profiler:
        step()
        clock.wait()
    assert profiler.profiler is not None, "a profile that has ended has its events"
    return attributed(profiler.profiler.kineto_results.events(), on_gpu=clock.is_gpu)


def attributed(events: Sequence[Any], *, on_gpu: bool) -> Trace:
    """Kernels of a profile by the stage in which the host launched them.

    A kernel and the call that launched it have equal correlation ids, also where Triton launches. The profiler's own
    ranges of the device miss such kernels. Raises AssertionError without kernels, or if stages
    and kernels differ by more than 1 %.
    """
    host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    ranges = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix("Muon.").split()[0])
        for event in host
        if event.name().startswith("Muon.")
    ]
    if on_gpu:
        calls = {event.correlation_id(): event.start_ns() for event in host if event.name().startswith("cu")}
        # A range of the host is listed again among the device's events.
        ranged = {event.name() for event in host}
        kernels = tuple(
            Kernel(event.name(), event.duration_ns() / 1e6, calls.get(event.correlation_id()))
            for event in events
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.name() not in ranged
        )
    else:
        kernels = tuple(outermost(event for event in host if event.name().startswith("aten::")))
    stages: dict[str, float] = {}
    for kernel in kernels:
        if kernel.launch is not None:
            # The last range that contains the launch is the innermost.
            inside = [(begin, stage) for begin, end, stage in ranges if begin <= kernel.launch < end]
            stage = max(inside)[1] if inside else "outside"
            stages[stage] = stages.get(stage, 0.0) + kernel.spent
    trace = Trace(kernels, stages)
    assert kernels, "the profiler has recorded no kernel"
    lost = abs(sum(stages.values()) - trace.total)
    assert lost <= LOST * trace.total, f"stages have {sum(stages.values()):.3f} ms, and kernels {trace.total:.3f} ms"
    return trace


def outermost(operators: Iterable[Any]) -> Iterator[Kernel]:
    """Operators that are not inside of another one on the same thread."""
    ends: dict[int, int] = {}
    for event in sorted(operators, key=lambda event: (event.start_ns(), -event.duration_ns())):
        if event.start_ns() >= ends.get(event.start_thread_id(), 0):
            ends[event.start_thread_id()] = event.start_ns() + event.duration_ns()
            yield Kernel(event.name(), event.duration_ns() / 1e6, event.start_ns())


def measure(name: str, rows: Rows, device: torch.device) -> None:
    """Rows of a world's slowest rank: the model, each kind of step, the host without work, and AdamW for the rest."""
    world, clock = read(name), Clock(device)
    torch.manual_seed(0)
    common = {"measured": "rank", "world": name, "ranks": world.size, "rank": world.rank}
    gpu = torch.cuda.get_device_name(device) if clock.is_gpu else ""
    with fake_world(world):
        rows.measure(lambda: modelled(plan_of(world), world.rank, gpu), **common, step="model")
    forget_meshes()
    world = world if clock.is_gpu else read("tiny")
    with fake_world(world):
        for narrow in (False, True):
            rank = Rank(world, device, narrow=narrow)
            kinds = list(product((False, True), (False, True), (True, False), (False,)))
            # A graph of the kernels alone, where a GPU may have one.
            kinds += [(True, skippable, True, True) for skippable in (False, True) if clock.is_gpu]
            for fused, skippable, new, captured in kinds:
                if narrow and not new:
                    continue
                step = {"step": "host, narrow" if narrow else "step", "fused": fused, "skippable": skippable,
                        "gradients": "new" if new else "constant", "captured": captured}  # fmt: skip
                kind = {"fused": fused, "skippable": skippable, "new": new, "captured": captured}
                rows.measure(partial(rank.measured, REPEATS[device.type], **kind), **common, **step)
        del rank
        rows.measure(Rank(world, device).time_adamw, **common, step="AdamW of the rest")
