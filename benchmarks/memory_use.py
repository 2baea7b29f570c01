"""What a piece of code allocates, to the byte, for the benchmarks."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
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


def _on_cuda(fn: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    # Memory that another stream still uses is counted until that stream is done with it.
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    returned = fn()
    torch.cuda.synchronize(device)
    return returned, torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
