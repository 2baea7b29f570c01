"""Closes the gaps of CPU, gloo and torch version that torchtitan 0.3.0 leaves, one function for each gap.

`install()` runs before any other import of torchtitan, because torchtitan's modules copy the device when
they are imported. On a GPU only what the torch version lacks is filled in.
"""

import importlib
import importlib.util
import inspect
import os
import re
import resource
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import debug
from torch.nn.attention.flex_attention import create_block_mask

from titan_muon.titan.recipe.degrees import has_torch

TORCHTITAN_VERSION = "0.3.0"
"""The version of torchtitan whose gaps these are."""

_DECODER_SHARDING = ("apply_fsdp_to_decoder", "apply_fsdp_to_mtp_decoder")
_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def install() -> bool:
    """Close every gap of this machine; calling it again changes nothing. True if training runs on the CPU.

    Raises RuntimeError if torchtitan was already imported and took another device than the CPU.
    """
    stub_triton_kernels()
    backfill_set_timeout()
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        use_cpu_device()
    time_out_all_groups()
    if on_cpu:
        skip_peak_flops()
        make_masks_without_compiler()
        hush_router_autocast()
        exchange_pieces_of_any_size()
        offload_without_pinning()
    return on_cpu


def stub_triton_kernels() -> None:
    """Let torchtitan's models import where triton is absent, as it is beside CPU builds of torch.

    torchtitan 0.3.0 imports the Triton kernels of one expert-parallel backend with every model. In their
    place comes a module whose functions raise when they are called. Ends when torchtitan imports them only
    where they are used.
    """
    if importlib.util.find_spec("triton") is None and _TRITON_KERNELS not in sys.modules:
        sys.modules[_TRITON_KERNELS] = _MissingKernels(_TRITON_KERNELS)


class _MissingKernels(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} needs triton, which is not installed")

        return missing


def backfill_set_timeout() -> None:
    """Provide torch.distributed.set_timeout, which torchtitan calls after a step. Ends with torch 2.14."""
    if not hasattr(dist, "set_timeout"):

        def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
            with warnings.catch_warnings():
                # Of groups that have neither gloo nor NCCL, and so no time-out: the host mesh of a single process.
                warnings.filterwarnings("ignore", message="Set timeout is now only supported")
                dist.distributed_c10d._set_pg_timeout(timeout, group)

        dist.set_timeout = set_timeout  # type: ignore[attr-defined]


def use_cpu_device() -> None:
    """Make the CPU torchtitan's device. Ends when torchtitan falls back to the CPU instead of CUDA.

    Raises RuntimeError if a module of torchtitan has already copied the other device.
    """
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    if utils.device_type == "cpu":
        return
    late = [name for name in ("torchtitan.distributed", "torchtitan.components.metrics") if name in sys.modules]
    if late:
        raise RuntimeError(f"compat.install() must run before {late[0]} is imported: it has taken {utils.device_type}")
    utils.device_type = "cpu"
    utils.device_module = _CpuDevice("titan_muon.cpu_device")


class _CpuDevice(types.ModuleType):
    """torch.cpu and what torchtitan expects of torch.cuda beyond it. Memory is the process's, in bytes."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: object = None) -> types.SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="CPU", total_memory=total)

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The operating system keeps the peak of the whole run."""

    @staticmethod
    def empty_cache() -> None:
        """There is no cache."""


def skip_peak_flops() -> None:
    """Report no peak FLOPS on the CPU, so that MFU is 0 rather than a share of a GPU that is not there.

    torchtitan 0.3.0 asks `lspci` and then assumes an A100. Ends when it knows the CPU.
    """
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    utils.get_peak_flops = lambda device_name: float("inf")


def make_masks_without_compiler() -> None:
    """Build attention masks eagerly on the CPU: training then needs no C++ compiler and waits for none.

    torchtitan and torch's context parallelism compile `create_block_mask` for each process. Ends when
    either takes an uncompiled mask.
    """
    attention: Any = importlib.import_module("torchtitan.models.common.attention")
    attention._compiled_create_block_mask = create_block_mask
    module = "torch.distributed.tensor.experimental._context_parallel._attention"
    context_parallel: Any = importlib.import_module(module)
    context_parallel._compiled_create_block_mask = create_block_mask


def hush_router_autocast() -> None:
    """Silence the warning that each MoE router causes on the CPU, where autocast to float32 does not exist.

    torchtitan 0.3.0 wraps the router's matrix product in it on every device; on the CPU the product runs in
    the parameters' dtype instead. Ends when torchtitan asks the device first.
    """
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")


def exchange_pieces_of_any_size() -> None:
    """Let spmd_types exchange unequal pieces on gloo, as expert parallelism does from torch 2.14 on.

    spmd_types 0.2.3 gives `all_to_all` a list of pieces, and gloo takes lists of equal pieces alone. Ends when gloo
    takes others, or spmd_types calls `all_to_all_single`.
    """
    reference: Any = importlib.import_module("spmd_types._dist")
    if reference.dist is dist:
        reference.set_dist(_AnySize("titan_muon.any_size"))


class _AnySize(types.ModuleType):
    """torch.distributed, with its `all_to_all` by `all_to_all_single`, which takes pieces of any size."""

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    @staticmethod
    def all_to_all(
        outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        sizes = [output.numel() for output in outputs]
        received = outputs[0].new_empty(sum(sizes))
        sent = torch.cat([piece.flatten() for piece in inputs])
        dist.all_to_all_single(received, sent, sizes, [piece.numel() for piece in inputs], group)
        for output, piece in zip(outputs, received.split(sizes), strict=True):
            output.copy_(piece.view_as(output))


def offload_without_pinning() -> None:
    """Offload parameters on the CPU too, where nothing can pin memory. Ends when torchtitan does not ask to there."""
    fsdp: Any = importlib.import_module("torchtitan.distributed.fsdp")
    fsdp.CPUOffloadPolicy = lambda: CPUOffloadPolicy(pin_memory=False)


def shards_decoders(parallelize_fn: Callable[..., Any]) -> bool:
    """Whether a parallelize_fn shards by one of torchtitan's functions for decoders, as those of its decoders do."""
    return any(hasattr(sys.modules[parallelize_fn.__module__], name) for name in _DECODER_SHARDING)


@contextmanager
def sharding_decoders_by(parallelize_fn: Callable[..., Any], shard: Callable[..., None]) -> Iterator[None]:
    """While open, `parallelize_fn` shards its decoder by `shard(apply, **arguments)`.

    `apply` is torchtitan's own function and `arguments` are what it is called with, by name and with its defaults.
    torchtitan 0.3.0 calls it after tensor parallelism, activation checkpointing and compilation, and lets nobody say
    which parameters it is to leave out. Ends when `apply_fsdp_to_decoder` takes `ignored_params`.
    """
    module: Any = sys.modules[parallelize_fn.__module__]
    (name,) = (name for name in _DECODER_SHARDING if hasattr(module, name))
    original = getattr(module, name)

    def replacement(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        shard(original, **bound.arguments)

    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def clipping_by(clip: Callable[[], torch.Tensor]) -> Iterator[None]:
    """While open, TorchTitan's step clips gradients by `clip()`, which returns their norm.

    torchtitan 0.3.0 clips all parameters by one norm, and its function fails on parameters of unequal meshes. Ends when
    its trainer clips by a method.
    """
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    original = utils.clip_grad_norm_
    utils.clip_grad_norm_ = lambda *args, **kwargs: clip()
    try:
        yield
    finally:
        utils.clip_grad_norm_ = original


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While open, TorchTitan's training loop ends without the two seconds of sleep in which others may end.

    Ends when torchtitan waits for the other ranks instead: here they meet when the process group is destroyed.
    """
    trainer: Any = importlib.import_module("torchtitan.trainer")
    original = trainer.time
    trainer.time = types.SimpleNamespace(perf_counter=original.perf_counter, sleep=lambda seconds: None)
    try:
        yield
    finally:
        trainer.time = original


def nonfinite_loss(error: RuntimeError) -> float | None:
    """The loss that torchtitan 0.3.0 ended a step for because it is not finite; None for any other error.

    Ends when it raises an error of its own kind, or reports the step first.
    """
    found = re.match(r"Loss is not finite \(global_avg_loss=(\S+)\)", str(error))
    return None if found is None else float(found[1])


def spmd_backend(requested: str, *, owned: bool = False, uneven_vocabulary: bool = False) -> str:
    """TorchTitan's SPMD backend for `parallelism.spmd_backend`.

    `auto` is `partial_dtensor` before torch 2.14, where FSDP2 cannot shard plain tensors on a full SPMD mesh; for owned
    matrices, which have a data-parallel mesh of their own; and for a vocabulary that tensor parallelism does not
    divide, whose loss torchtitan's own default `spmd_types` cannot compute. Any other name is returned as it is; raises
    ValueError for `spmd_types` with such a vocabulary.
    """
    if requested == "spmd_types" and uneven_vocabulary:
        raise ValueError(
            "parallelism.spmd_backend = 'spmd_types' takes a vocabulary that tensor_parallel_degree divides; use 'auto'"
        )
    if requested != "auto":
        return requested
    return "spmd_types" if has_torch(2, 14) and not owned and not uneven_vocabulary else "partial_dtensor"


def init_distributed(
    config: Any, *, cpu_backend: bool = False, folder: str = "", store: dist.Store | None = None
) -> None:
    """TorchTitan's `init_distributed` with a CommConfig, on `store` unless that is None.

    torchtitan 0.3.0 takes no store, and writes its trace_buf_size over TORCH_FR_BUFFER_SIZE where the recipe asks for
    no traces; here the user's stays. Ends when it does neither.
    """
    asked = os.environ.get("TORCH_FR_BUFFER_SIZE")
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    original = dist.init_process_group

    def init_process_group(**arguments: Any) -> None:
        # Read when the group is made, so this is the last moment to put it back.
        if asked is not None and config.trace_buf_size == 0:
            os.environ["TORCH_FR_BUFFER_SIZE"] = asked
        if store is not None:
            arguments |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        original(**arguments)

    dist.init_process_group = init_process_group  # type: ignore[assignment]
    try:
        utils.init_distributed(config, cpu_backend, base_folder=folder)
    finally:
        dist.init_process_group = original


ASYNC_CHECKPOINT = "asynchronous checkpoint"
"""Description of the process group that a save in the background has for itself."""


def time_out_all_groups() -> None:
    """Have torchtitan give its time-outs to every process group, not only to the default one and those of the mesh.

    A group made beside them, as for the signal to stop, keeps PyTorch's 30 minutes, and a process whose peer hangs
    does not end before. Left out is the group of asynchronous checkpoints, in which a rank that has little to write
    waits for the others through a whole save. Ends when torchtitan sets the time-out of all groups.
    """
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    original = utils.set_pg_timeouts
    if hasattr(original, "of_all_groups"):
        return

    def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
        original(timeout, parallel_dims)
        set_timeouts(timeout)

    set_pg_timeouts.of_all_groups = True  # type: ignore[attr-defined]
    utils.set_pg_timeouts = set_pg_timeouts


def set_timeouts(timeout: timedelta) -> None:
    """Give every process group of this process a time-out, but that of asynchronous checkpoints."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != ASYNC_CHECKPOINT:
            dist.set_timeout(timeout, group)  # type: ignore[attr-defined]


def forget_meshes() -> None:
    """Have DTensor forget the meshes of a model before: on an equal one of another model, FSDP2 would refuse them."""
    debug._clear_sharding_prop_cache()
