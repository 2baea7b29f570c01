"""Workarounds for gaps of torchtitan 0.3.0 on CPU, gloo and older torch, a function per gap.

`titan_muon.trainer` calls `install()` when torchtitan is imported: torchtitan's modules copy the device on import.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import resource
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.attention.flex_attention import create_block_mask

from titan_muon.trainer.device import on_accelerator
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.degrees import has_torch_for

TORCHTITAN_VERSION = "0.3.0"

_DECODER_SHARDING = ("apply_fsdp_to_decoder", "apply_fsdp_to_mtp_decoder")
_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_ATTENTION = "torchtitan.models.common.attention"


def check_version() -> None:
    """Raise RecipeError for a torchtitan that recipes do not know, by its module of loaders."""
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec("torchtitan.components.dataloader") is not None:
            return
    spec, version = importlib.util.find_spec("torchtitan"), importlib.metadata.version("torchtitan")
    folder = "" if spec is None else ", ".join(spec.submodule_search_locations or ())
    raise RecipeError(
        f"recipes know torchtitan's release {TORCHTITAN_VERSION}, and the torchtitan in {folder} (version {version}) "
        f"has other loaders: `pip install --force-reinstall torchtitan=={TORCHTITAN_VERSION}`, or train with "
        "torchtitan's own configuration and titan_muon.trainer.HybridOptimizers.Config()"
    )


def install() -> bool:
    """Install all workarounds for this machine, once. True if training runs on the CPU.

    Raises RuntimeError as `use_cpu_device`.
    """
    # The import calls this function, unless torchtitan was imported before titan_muon.trainer.
    importlib.import_module("torchtitan")
    return _install()


@functools.cache
def _install() -> bool:
    stub_triton_kernels()
    backfill_mesh_dims()
    backfill_set_timeout()
    on_cpu = not on_accelerator()
    if on_cpu:
        use_cpu_device()
    time_out_all_groups()
    if on_cpu:
        make_masks_without_compiler()
        hush_warnings()
        exchange_pieces_of_any_size()
        offload_without_pinning()
    drop_unknown_mask_options()
    return on_cpu


def stub_triton_kernels() -> None:
    """Let torchtitan's models import without triton. The stub's functions raise on a call.

    Remove when torchtitan imports its expert-parallel Triton kernels on use.
    """
    if importlib.util.find_spec("triton") is None:
        kernels: Any = types.ModuleType(_TRITON_KERNELS)
        kernels.__getattr__ = _missing_kernel
        sys.modules[_TRITON_KERNELS] = kernels


def _missing_kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{_TRITON_KERNELS}.{name} needs triton, which is not installed")

    return missing


def backfill_mesh_dims() -> None:
    """Let torchtitan import the name of FSDP2's mesh dims, which only spmd_types uses. Remove with torch 2.12."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        vars(fsdp)["DataParallelMeshDims"] = type("DataParallelMeshDims", (), {})


def backfill_set_timeout() -> None:
    """Provide torch.distributed.set_timeout for torchtitan. Remove with torch 2.14."""
    if not hasattr(dist, "set_timeout"):

        def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
            with warnings.catch_warnings():
                # Groups without gloo and NCCL have no time-out.
                warnings.filterwarnings("ignore", message="Set timeout is now only supported")
                dist.distributed_c10d._set_pg_timeout(timeout, group)

        dist.set_timeout = set_timeout  # type: ignore[attr-defined]


def use_cpu_device() -> None:
    """Make the CPU torchtitan's device. Remove when torchtitan falls back to the CPU.

    Raises RuntimeError if a module of torchtitan has already copied the other device.
    """
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    if utils.device_type == "cpu":
        return
    late = [name for name in ("torchtitan.distributed", "torchtitan.components.metrics") if name in sys.modules]
    if late:
        raise RuntimeError(f"compat.install() must run before {late[0]} is imported: it has taken {utils.device_type}")
    utils.device_type = "cpu"
    utils.device_module = _cpu_device()
    # MFU is 0, because torchtitan would assume an A100.
    utils.get_peak_flops = lambda device_name: float("inf")


def _cpu_device() -> types.SimpleNamespace:
    """torch.cpu with torch.cuda's functions; memory of the process, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_stats(device: object = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    functions = {
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="CPU", total_memory=total),
        "memory_stats": memory_stats,
        # The operating system keeps the peak, and there is no cache.
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    return types.SimpleNamespace(**{**vars(torch.cpu), **functions})


def make_masks_without_compiler() -> None:
    """Build attention masks without a C++ compiler. Remove when torchtitan and torch accept an uncompiled mask."""
    for name in (_ATTENTION, "torch.distributed.tensor.experimental._context_parallel._attention"):
        module: Any = importlib.import_module(name)
        module._compiled_create_block_mask = create_block_mask


def drop_unknown_mask_options() -> None:
    """Call `create_block_mask` without arguments that torch 2.11 and 2.12 lack. Remove with torch 2.13."""
    known = inspect.signature(create_block_mask).parameters
    attention: Any = importlib.import_module(_ATTENTION)
    create = attention._compiled_create_block_mask
    if "separate_full_blocks" not in known:

        @functools.wraps(create)
        def create_known(*args: Any, **kwargs: Any) -> Any:
            return create(*args, **{name: value for name, value in kwargs.items() if name in known})

        attention._compiled_create_block_mask = create_known


def hush_warnings() -> None:
    """Silence warnings without a remedy in a recipe.

    - MoE routers request float32 autocast. Remove when torchtitan checks the device.
    - DTensor's all-to-all is an all-gather on gloo. Remove when DTensor calls all_to_all_single there.
    """
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    text = "CPU process group does not support alltoall"
    collectives = logging.getLogger("torch.distributed.tensor._collective_utils")
    collectives.addFilter(lambda record: not str(record.msg).startswith(text))


def exchange_pieces_of_any_size() -> None:
    """Let spmd_types 0.2.3 exchange unequal pieces on gloo, for expert parallelism since torch 2.14.

    Remove when gloo's `all_to_all` accepts unequal pieces, or spmd_types calls `all_to_all_single`.
    """
    reference: Any = importlib.import_module("spmd_types._dist")
    reference.set_dist(types.SimpleNamespace(**{**vars(dist), "all_to_all": _all_to_all}))


def _all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    sizes = [output.numel() for output in outputs]
    received = outputs[0].new_empty(sum(sizes))
    sent = torch.cat([piece.flatten() for piece in inputs])
    dist.all_to_all_single(received, sent, sizes, [piece.numel() for piece in inputs], group)
    for output, piece in zip(outputs, received.split(sizes), strict=True):
        output.copy_(piece.view_as(output))


def offload_without_pinning() -> None:
    """Offload parameters without pinned memory on the CPU. Remove when torchtitan does."""
    sharding: Any = importlib.import_module("torchtitan.distributed.fsdp")
    sharding.CPUOffloadPolicy = lambda: CPUOffloadPolicy(pin_memory=False)


def shards_decoders(parallelize_fn: Callable[..., Any]) -> bool:
    """Whether a parallelize_fn uses torchtitan's sharding functions for decoders."""
    return any(hasattr(sys.modules[parallelize_fn.__module__], name) for name in _DECODER_SHARDING)


@contextmanager
def sharding_decoders_by(parallelize_fn: Callable[..., Any], shard: Callable[..., None]) -> Iterator[None]:
    """Replace torchtitan's sharding of the decoder by `shard(apply, **arguments)` in this context.

    `apply`: torchtitan's function; `arguments`: all of its arguments by name. Remove when `apply_fsdp_to_decoder` takes
    `ignored_params`.
    """
    module: Any = sys.modules[parallelize_fn.__module__]
    (name,) = (name for name in _DECODER_SHARDING if hasattr(module, name))
    original = getattr(module, name)

    def replacement(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        shard(original, **bound.arguments)

    with patch.object(module, name, replacement):
        yield


def clipping_by(clip: Callable[[], torch.Tensor]) -> AbstractContextManager[object]:
    """Replace TorchTitan's gradient clipping by `clip()`, which returns the norm, in this context.

    torchtitan 0.3.0 fails on parameters of different meshes. Remove when the trainer clips in a method.
    """
    utils = importlib.import_module("torchtitan.distributed.utils")
    return patch.object(utils, "clip_grad_norm_", lambda *args, **kwargs: clip())


def ending_at_once() -> AbstractContextManager[object]:
    """Skip the two seconds of sleep at the end of TorchTitan's training loop in this context.

    Destroying the process group synchronizes the ranks.
    """
    trainer = importlib.import_module("torchtitan.trainer")
    without_sleep = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    return patch.object(trainer, "time", without_sleep)


def reporting_every_loss() -> AbstractContextManager[object]:
    """Let the trainer report a non-finite loss too, in this context. Remove when it reports before it raises."""
    trainer = importlib.import_module("torchtitan.trainer")
    return patch.object(trainer, "math", types.SimpleNamespace(isfinite=lambda loss: True))


def spmd_backend(requested: str, *, owned: bool = False, uneven_vocabulary: bool = False) -> str:
    """TorchTitan's SPMD backend for `parallelism.spmd_backend`.

    `auto` is `spmd_types`, but `partial_dtensor` before torch 2.14 (FSDP2 cannot shard plain tensors on a full SPMD
    mesh), for owned matrices (with a separate data-parallel mesh), and for a vocabulary that tensor parallelism does
    not divide (torchtitan cannot compute the loss). Raises ValueError for `spmd_types` with an uneven vocabulary.
    """
    if requested == "spmd_types" and uneven_vocabulary:
        raise ValueError(
            "parallelism.spmd_backend = 'spmd_types' takes a vocabulary that tensor_parallel_degree divides; use 'auto'"
        )
    if requested != "auto":
        return requested
    fits = has_torch_for("parallelism.spmd_backend") and not owned and not uneven_vocabulary
    return "spmd_types" if fits else "partial_dtensor"


def init_distributed(config: Any, *, store: dist.Store, cpu_backend: bool = False, folder: str = "") -> None:
    """TorchTitan's `init_distributed` on `store`. Keeps the user's TORCH_FR_BUFFER_SIZE without traces.

    Remove when torchtitan does so.
    """
    buffer_size = os.environ.get("TORCH_FR_BUFFER_SIZE")
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    original = dist.init_process_group

    def init_process_group(**arguments: Any) -> None:
        # Before the new group reads the variable.
        if buffer_size is not None and config.trace_buf_size == 0:
            os.environ["TORCH_FR_BUFFER_SIZE"] = buffer_size
        world = int(os.environ["WORLD_SIZE"])
        original(**arguments, store=store, rank=int(os.environ["RANK"]), world_size=world)

    with patch.object(dist, "init_process_group", init_process_group):
        utils.init_distributed(config, cpu_backend, base_folder=folder)


ASYNC_CHECKPOINT = "asynchronous checkpoint"


def time_out_all_groups() -> None:
    """Apply torchtitan's time-outs as in `set_timeouts`, not only to the default group and the mesh's groups.

    Remove when torchtitan sets all time-outs.
    """
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    original = utils.set_pg_timeouts

    def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
        original(timeout, parallel_dims)
        set_timeouts(timeout)

    utils.set_pg_timeouts = set_pg_timeouts


def set_timeouts(timeout: timedelta) -> None:
    """Set the time-out of every process group.

    Except for asynchronous checkpoints, where a rank with little data waits for the whole save.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != ASYNC_CHECKPOINT:
            dist.set_timeout(timeout, group)  # type: ignore[attr-defined]
