"""What a piece of code allocates, to the byte, for the benchmarks."""

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
    """What `fn` returns, the most bytes that were allocated on a device while it ran, and those left when it was done.

    On the CPU every allocation and release of PyTorch's allocator is an event of its profiler; on CUDA the allocator
    counts them itself.
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
    """What `fn` returns, and the bytes on a device that tensors have more than before when it is done.

    On the CPU of the tensors that Python knows: gloo's threads release the copies that its collectives go through
    whenever they come to it, which the profiler does not always see.
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
    # type() and not isinstance(), which asks lazy modules for attributes that import them. A DTensor has no storage
    # itself, and that of its local tensor is among the others.
    found = (each for each in gc.get_objects() if type(each) in (Tensor, Parameter) and each.device.type == "cpu")
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


def _on_cuda(fn: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    # Memory that another stream still uses is counted until that stream is done with it.
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    returned = fn()
    torch.cuda.synchronize(device)
    return returned, torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
