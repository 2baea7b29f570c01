"""Stand-ins for the parts of torch.cuda that Megatron-FSDP calls on CPUs. Import before megatron_fsdp."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Event:
    """An event, or a stream, that has always happened."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


@contextlib.contextmanager
def _context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any) -> None: ...


def install() -> None:
    cuda: Any = torch.cuda
    stream = Event()
    cuda.Stream = cuda.Event = Event
    cuda.current_stream = lambda device=None: stream
    cuda.stream = cuda.device = _context
    cuda.current_device = lambda: 0
    cuda.synchronize = cuda.empty_cache = cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


install()
