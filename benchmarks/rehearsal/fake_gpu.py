"""A machine with fake GPUs: CUDA tensors without memory, and a torch.cuda that never waits.

Needs a CUDA build of PyTorch and no GPU. Tensors on `cuda` are FakeTensors; tensors on `cpu` are real. A read from the
GPU raises where reading is forbidden, and returns made-up values elsewhere.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.polyfills.loader
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_muon.kernels import fused
from titan_muon.kernels.batches import TableLaunch

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
NAME, CAPABILITY, MEMORY = "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)

UNWRITTEN = 2**16
"""Offloaded host tensors of this size or more have no memory, because a model's states may not fit."""


class DeviceSync(RuntimeError):
    """The host waited for the device where waiting is forbidden."""


class FakeGpu(FakeTensorMode):
    """Mode of fake CUDA tensors. Made by `fake_gpu`.

    Attributes:
        size: value of every 64-bit integer, a size, that the host reads from the device.
        syncs: operators by which the host read or waited, in order.
        has_meta_tensors: whether the program makes meta tensors itself, as during construction.
    """

    # The real guard of CUDA devices calls the driver; this flag makes FakeTensorMode use a no-op guard.
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.size = 0
        self.syncs: list[str] = []
        self.has_meta_tensors = True
        self._forbids, self._moment = False, 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forbid the host to read from the device, or to wait for work queued in this context."""
        before = self.sync_debug_mode()
        self.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.set_sync_debug_mode(before)

    def sync_debug_mode(self) -> int:
        """torch.cuda.get_sync_debug_mode."""
        return 2 if self._forbids else 0

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Forbid the host to wait if `mode` is "error" or 2: torch.cuda.set_sync_debug_mode."""
        self._forbids = mode in ("error", 2)
        self._moment += int(self._forbids)

    def sync(self, what: str, moment: int | None = None) -> None:
        """Record a wait of the host, for the whole queue or for work queued at an earlier `moment`.

        Raises DeviceSync where waiting is forbidden.
        """
        self.syncs.append(what)
        if self._forbids and (moment is None or moment == self._moment):
            raise DeviceSync(f"{what}: the host waits for the device")

    def moment(self) -> int:
        """A number that changes with the next `no_sync`."""
        return self._moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        device = kwargs.get("device")
        if device is not None and device.type == "meta" and (fakes or not self.has_meta_tensors):
            # In C++ a fake tensor is a meta tensor (see `_seen_from_cpp`), and tensors made there are too.
            kwargs["device"] = device = GPU
        if not fakes and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in (*leaves, device)):
            return _on_host(func, args, kwargs)
        if device == CPU and func not in COPIES:
            # A host tensor like a device tensor needs real memory.
            kwargs.pop("pin_memory", None)
            if func is torch.ops.aten.zeros_like.default and args[0].numel() >= UNWRITTEN:
                func = torch.ops.aten.empty_like.default
            return _on_host(func, *tree_map_only(FakeTensor, _unwritten, (args, kwargs)))
        if func in COPIES:
            return self._copy(func, args, kwargs)
        if func in READS:
            self.sync(str(func))
            return self.size
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        to, source = (args[0], args[1]) if func is COPIES[1] else (None, args[0])
        target = to.device if to is not None else torch.device(kwargs.get("device") or source.device)
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if source.device.type != target.type and waits:
            self.sync(f"{func} from {source.device.type} to {target.type}")
        if target.type != "cpu":
            return super().__torch_dispatch__(func, (), args, kwargs)
        if to is not None and to.is_floating_point() and to.numel() >= UNWRITTEN:
            return to
        made_up = _zeros(source, kwargs.get("dtype"))
        if made_up.dtype == torch.int64:
            made_up.fill_(self.size)
        return made_up if to is None else to.copy_(made_up.to(to.dtype))


def _unwritten(tensor: Tensor) -> Tensor:
    """A host tensor like a fake tensor, with memory on the first write."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)


def _zeros(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A real host tensor of a fake tensor's size."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype if dtype is None else dtype, device=CPU)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # Pinned memory needs the driver.
    if func is torch.ops.aten._pin_memory.default:
        return args[0].clone()
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return func(*args, **kwargs)


class FakeEvent:
    """A completed event of the device. To wait for an event of the same step is to wait for the device."""

    gpu: FakeGpu

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._moment = self.gpu.moment()

    def record(self, stream: object = None) -> None:
        self._moment = self.gpu.moment()

    def wait(self, stream: object = None) -> None:
        """No wait of the host."""

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """A wait of the host."""
        self.gpu.sync("Event.synchronize", self._moment)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Nonzero, because rates divide by the time."""
        return 1.0


class FakeStream:
    """A stream of the device without work."""

    device_type, device_index, stream_id, cuda_stream = 1, 0, 0, 0
    device = GPU
    gpu: FakeGpu

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        self.priority = priority

    def wait_stream(self, stream: FakeStream) -> None:
        """No wait of the host."""

    def wait_event(self, event: FakeEvent) -> None:
        """No wait of the host."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event, by default a new one."""
        recorded = torch.cuda.Event() if event is None else event
        recorded.record()
        return recorded

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """A wait of the host."""
        self.gpu.sync("Stream.synchronize")


@contextmanager
def fake_gpu(gpu: FakeGpu | None = None) -> Iterator[FakeGpu]:
    """Replace this process's machine by one with 8 GPUs in this context.

    Tensors of different `gpu` objects do not mix; the default is a new object. Raises RuntimeError without a CUDA build
    of PyTorch.
    """
    if not torch.backends.cuda.is_built():
        raise RuntimeError("fake GPUs need a CUDA build of PyTorch, with or without a GPU: make newest")
    gpu = FakeGpu() if gpu is None else gpu
    with ExitStack() as stack:
        for module, replaced in _replaced(gpu):
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(module, name, value, create=True))
        # By config.patch: an option replaced and restored by mock no longer exists.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        for hop in (flex_attention, flex_attention_backward):
            # Higher-order operators have an implementation per mode class.
            hop.python_key_table[FakeGpu] = hop.python_key_table[FakeTensorMode]
        stack.enter_context(gpu)
        yield gpu


@contextmanager
def fake_rank(world_size: int, rank: int) -> Iterator[None]:
    """Act as a rank of a job: environment, and a default process group that acts for all ranks."""
    # The only fake GPU belongs to this process, as if each process saw its own GPU.
    ours = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update({name: str(value) for name, value in ours.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _replaced(gpu: FakeGpu) -> Sequence[tuple[Any, dict[str, object]]]:
    """Replacements by module or class."""
    # Classes per machine: annotations name them, and code uses isinstance.
    event, stream = (type(kind.__name__, (kind,), {"gpu": gpu}) for kind in (FakeEvent, FakeStream))
    cuda = _cuda(gpu, event, stream)
    return (
        (torch.cuda, cuda),
        (torch.accelerator, {**_accelerator(), "current_stream": cuda["current_stream"]}),
        (torch, {"Event": event}),
        # Triton needs a driver, and fake tensors have no addresses.
        (fused, {"usable": lambda kind: True, "address": lambda memory: 0}),
        (TableLaunch, {"run": lambda launch, *arguments: None}),
        # Before torch 2.13 a fake tensor of a GPU asks the driver for a real one.
        (fake_tensor, {"init_gpu_context": lambda device: None}),
        # torch.compile needs a driver. Uncompiled FlexAttention is a single operator all the same.
        (flex, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}),
        *_seen_from_cpp(),
    )


def _accelerator() -> dict[str, object]:
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "device_count": lambda: 8,
    }


def _cuda(gpu: FakeGpu, event: type, stream: type) -> dict[str, object]:
    current = stream()
    properties = types.SimpleNamespace(
        name=NAME, total_memory=MEMORY, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "Stream": stream,
        "Event": event,
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "stream": _current,
        "synchronize": lambda device=None: gpu.sync("cuda.synchronize"),
        "get_sync_debug_mode": gpu.sync_debug_mode,
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8, device=CPU),
        "set_rng_state": lambda *args, **kwargs: None,
    }


@contextmanager
def _current(stream: FakeStream) -> Iterator[FakeStream]:
    yield stream


def _seen_from_cpp() -> Sequence[tuple[Any, dict[str, object]]]:
    """Make fake tensors meta tensors in C++ and CUDA tensors in Python.

    Autograd's engine runs CUDA operations in a thread per GPU, and asks the driver for streams.
    """
    make_subclass = torch.Tensor._make_subclass

    def make(
        cls: type, elem: Tensor, requires_grad: bool = False, *, dispatch_device: bool = False, **kwargs: Any
    ) -> Any:
        return make_subclass(cls, elem, requires_grad, **kwargs)

    def kind(name: str, read: Callable[[Any], torch.device]) -> property:
        return property(lambda tensor: read(tensor).type == name)

    def local(tensor: Any) -> torch.device:
        return tensor._local_tensor.device

    kinds = ("cuda", "cpu", "meta")
    return (
        (torch.Tensor, {"_make_subclass": staticmethod(make)}),
        (FakeTensor, {f"is_{name}": kind(name, lambda tensor: tensor.fake_device) for name in kinds}),
        (DTensor, {"device": property(local), **{f"is_{name}": kind(name, local) for name in kinds}}),
    )
