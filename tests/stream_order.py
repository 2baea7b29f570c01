"""Streams on a CPU machine: a missing wait between streams raises.

Streams with vector clocks replace the CPU's null streams. Each operation belongs to the current stream, and reads and
writes storages. Two accesses of a storage, at least one of them a write, must be ordered. So must accesses of freed
memory and of later allocations in this memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
"""Number of finished operations by stream."""


def advance(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class Stream:
    """A stream of torch.cpu with a record of the order of operations."""

    made = 0

    def __init__(self, priority: int = 0) -> None:
        Stream.made += 1
        self.name, self.priority, self.clock = f"stream {Stream.made}", priority, {}

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        advance(self.clock, event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event(dict[str, int]):
    """An event of torch.cpu: the finished operations when recorded."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def record(self, stream: Stream | None = None) -> None:
        self.update((self._order.current if stream is None else stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (self._order.current if stream is None else stream).wait_event(self)


@dataclass
class Memory:
    """A storage: stream, accesses, and earlier accesses of the same memory."""

    storage: StorageWeakRef
    stream: Stream
    freed_before: Clock
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)


class StreamOrder(TorchDispatchMode):
    """While active, raises AssertionError for an access without a wait for an earlier access.

    Attributes:
        compute: the current stream at the start.
        log: stream and name of every operation with reads or writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.compute = Stream()
        self.log: list[tuple[Stream, str]] = []
        self._memory: dict[int, Memory] = {}
        self._freed: dict[str, Clock] = {}

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._collect()
        result = func(*args, **kwargs)
        if func._schema.name.endswith("_base_"):
            # The fake process group leaves outputs unwritten, and a NaN in old memory would end a step.
            args[0].zero_()
        returned = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            return result
        self._access(func, args, kwargs, result)
        return result

    def _access(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, schema = func._schema.name, func._schema.arguments
        arguments = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        everything = func.namespace == "c10d"
        changed = {a.name for a in schema if everything or (a.alias_info is not None and a.alias_info.is_write)}
        writes = [t for n in changed if n in arguments for t in tensors(arguments[n])]
        reads = [t for n in arguments if n not in changed for t in tensors(arguments[n])]
        # A pure allocation is no access.
        for tensor in (*reads, *writes, *tensors(result)):
            self._known(tensor.untyped_storage())
        if "empty" in name:
            return
        self.log.append((self.current, name))
        clock = self.current.clock
        writes += () if everything else tensors(result)
        for tensor in writes:
            self._check(name, tensor, self._known(tensor.untyped_storage()), write=True)
        for tensor in reads:
            self._check(name, tensor, self._known(tensor.untyped_storage()), write=False)
        clock[self.current.name] = now = clock.get(self.current.name, 0) + 1
        for tensor in writes:
            self._known(tensor.untyped_storage()).writes[self.current.name] = now
        for tensor in reads:
            self._known(tensor.untyped_storage()).reads[self.current.name] = now

    def _known(self, storage: torch.UntypedStorage) -> Memory:
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._memory:
            freed = dict(self._freed.get(self.current.name, {}))
            self._memory[reference.cdata] = Memory(reference, self.current, freed)
        return self._memory[reference.cdata]

    def _check(self, name: str, tensor: Tensor, memory: Memory, *, write: bool) -> None:
        before = [("was freed", memory.freed_before), ("is written", memory.writes)]
        for what, times in [*before, *([("is read", memory.reads)] if write else [])]:
            for stream, time in times.items():
                assert self.current.clock.get(stream, 0) >= time, (
                    f"{name} on {self.current.name} does not wait for {stream}, where its memory "
                    f"{tuple(tensor.shape)} {what}"
                )

    def _collect(self) -> None:
        for key in [key for key, memory in self._memory.items() if memory.storage.expired()]:
            self._free(self._memory.pop(key))

    def _free(self, memory: Memory) -> None:
        freed = self._freed.setdefault(memory.stream.name, {})
        for times in (memory.freed_before, memory.reads, memory.writes):
            advance(freed, times)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is given up, or has memory again."""
        self._collect()
        reference = StorageWeakRef(storage)
        if size == 0 and reference.cdata in self._memory:
            self._free(self._memory.pop(reference.cdata))
        elif size > 0:
            self._known(storage)


@pytest.fixture
def stream_order(monkeypatch: pytest.MonkeyPatch) -> StreamOrder:
    """Record the order of operations on torch.cpu's streams in this context."""
    order, resize = StreamOrder(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        order.resized(storage, size)
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "Event", partial(Event, order))
    monkeypatch.setattr(torch.cpu, "stream", order.within)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: order.current)
    return order


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
