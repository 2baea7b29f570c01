"""What a piece of code allocates on the CPU, to the byte, for the benchmarks."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated(fn: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `fn` returns, the most bytes that were allocated while it ran, and those left when it was done.

    Every allocation and release of PyTorch's CPU allocator is an event of its profiler.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = fn()
    assert profiler.profiler is not None, "a profile that has ended has its events"
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = list(accumulate((change for _, change in changes), initial=0))
    return returned, max(live), live[-1]
