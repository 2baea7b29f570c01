"""Clock of calls on a device, and cost of a launch: microseconds of host and device, depth of the queue, and rates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import Rows
from benchmarks.one_gpu.links import measured_machine

CALLS = {"cuda": 200, "cpu": 20}
"""Calls back to back, fewer than the launch queue takes."""
QUEUED = 3000
"""Launches behind a busy device, more than the launch queue takes."""
BLOCKED = 1e-3
"""Seconds of a launch that waited for a place in the queue."""


@contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """A process group of this process, over NCCL on a GPU."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Clock:
    """Times of calls on a device."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether host and device are two."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[], object]) -> dict[str, float]:
        """Milliseconds of a call on an idle device: of the host until it returns, between two events, until both end.

        On the CPU the three are one.
        """
        self.wait()
        begin = time.perf_counter()
        if not self.is_gpu:
            run()
            return dict.fromkeys(("device ms", "host ms", "wall ms"), 1e3 * (time.perf_counter() - begin))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        host = time.perf_counter() - begin
        self.wait()
        wall = time.perf_counter() - begin
        return {"device ms": start.elapsed_time(end), "host ms": 1e3 * host, "wall ms": 1e3 * wall}


def calibrate(rows: Rows, device: torch.device) -> None:
    """Rows of launches, of the queue and of rates, and the planner's file of this machine."""
    with one_process(device):
        for name, make in launches(device).items():
            rows.measure(partial(microseconds, make, Clock(device)), measured="launches", launch=name)
        rows.measure(partial(queue, device), measured="launch queue")
        machine = measured_machine([], device)
    rows.write(measured="rates", memory=machine["memory_bandwidth"], **machine["flops"])
    document = {**machine, "source": rows.common["source"]}
    (rows.file.parent / "machine.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def microseconds(make: Callable[[], Callable[[], object]], clock: Clock) -> dict[str, float]:
    """Microseconds of a call among many back to back."""
    repeats, run = CALLS[clock.device.type], make()

    def many() -> None:
        for _ in range(repeats):
            run()

    clock.once(many)
    times = clock.once(many)
    return {f"{name} us": 1e3 * times[f"{name} ms"] / repeats for name in ("host", "device")}


def launches(device: torch.device) -> Mapping[str, Callable[[], Callable[[], object]]]:
    """By name, a function that prepares a call of one launch or few."""
    empty = partial(torch.zeros, 1, device=device)
    stacks = [torch.randn(2, 64, 64, device=device) for _ in range(3)]
    return {
        "empty add_": lambda: partial(empty().add_, 1),
        "bmm(out=) of 2 x 64 x 64": lambda: partial(torch.bmm, stacks[0], stacks[1], out=stacks[2]),
        "foreach add_ of 100": lambda: partial(torch._foreach_add_, [empty() for _ in range(100)], 1),
        "empty Triton kernel": lambda: triton_kernel(empty()),
        "all-reduce, world 1": lambda: partial(dist.all_reduce, empty()),
        **{f"graph of {nodes} nodes": partial(graph, empty(), nodes) for nodes in (10, 1000)},
        "pinned copy of 4 kB": lambda: partial(
            torch.empty(1024, device=device).copy_,
            torch.zeros(1024, pin_memory=device.type == "cuda"),
            non_blocking=True,
        ),
    }


def triton_kernel(tensor: Tensor) -> Callable[[], object]:
    """Launch of a kernel without work, by Triton's own launcher."""
    import triton

    @triton.jit
    def empty(pointer):  # type: ignore[no-untyped-def]
        pass

    return lambda: empty[(1,)](tensor)


def graph(tensor: Tensor, nodes: int) -> Callable[[], object]:
    """Replay of a CUDA graph of `nodes` small kernels."""
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # NCCL's watchdog asks for events in a thread of its own.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for _ in range(nodes):
            tensor.add_(1)
    return captured.replay


def queue(device: torch.device) -> dict[str, Any]:
    """Number of launches that the host makes while the device is busy, before one waits."""
    tensor = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    for number in range(QUEUED):
        begin = time.perf_counter()
        tensor.add_(1)
        if time.perf_counter() - begin > BLOCKED:
            return {"depth": number}
    return {"depth": f"more than {QUEUED}"}
