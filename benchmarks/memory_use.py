"""Allocations of a piece of code, to the byte, for the benchmarks."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")


def allocated(fn: Callable[[], Any], device: torch.device = CPU) -> tuple[Any, int, int]:
    """Result of `fn`, largest bytes allocated on a device meanwhile, and bytes left at the end.

    On the CPU from the allocator's profiler events; on CUDA from the allocator's counters.
    """
    if device.type == "cuda":
        return _on_cuda(fn, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = fn()
    assert profiler.profiler is not None, "a profile that has ended has its events"
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = list(accumulate((change for _, change in changes), initial=0))
    return returned, max(live), live[-1]


def kept(fn: Callable[[], Any], device: torch.device = CPU) -> tuple[Any, int]:
    """Result of `fn`, and the growth of tensors on a device in bytes.

    On the CPU only tensors known to Python count: gloo's threads release their copies at varying times, which the
    profiler may miss.
    """
    if device.type == "cuda":
        returned, _, left = _on_cuda(fn, device)
        return returned, left
    before = _held()
    returned = fn()
    return returned, _held() - before


def _held() -> int:
    """Bytes of the storages of all plain tensors on the CPU."""
    gc.collect()
    # type(), not isinstance(), which triggers imports in lazy modules. A DTensor has no storage; its local tensor is
    # also in the list.
    tensors = (t for t in gc.get_objects() if type(t) in (Tensor, Parameter) and t.device.type == "cpu")
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _on_cuda(fn: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    # Memory in use by another stream counts until that stream is done.
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    returned = fn()
    torch.cuda.synchronize(device)
    return returned, torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
