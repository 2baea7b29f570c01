"""One rank of a part: its device and process group, and what only a GPU tells, on GPUs, on CPUs or on fake GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_muon import muon
from titan_muon.agreement import Agreement

HOST_CALLS = ("_exchanged", "raise_together", "any_rank", "max_over_ranks")
"""Methods of Agreement by which hosts talk: of real tensors on the CPU, on GPUs that are not there as well."""
PLANNING = ("layout_of", "plan_rank", "report_of", "mesh_groups")
"""Functions that Muon calls to plan, which read the ranks of meshes."""


def begin(device: str) -> torch.device:
    """Join the processes that torchrun started, over NCCL on `cuda`, over gloo on `cpu`. Returns this rank's device."""
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine)
    return mine


def gathered(value: Any) -> list[Any]:
    """The picklable value of every rank, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def communicators() -> int:
    """Process groups of this rank, and those of them that NCCL has opened connections for."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return len(groups) + sum(map(_is_open, groups))


def _is_open(group: dist.ProcessGroup) -> bool:
    # Private: PyTorch has no public way to ask whether a group's first collective is still to come.
    if dist.get_backend(group) != "nccl" or dist.get_rank(group) < 0:
        return False
    return bool(group._get_backend(torch.device("cuda"))._is_initialized())  # type: ignore[attr-defined]


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Within it, the host must not wait for a GPU: PyTorch raises RuntimeError where it would."""
    if device.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def fake_gpus(rank: int, size: int) -> Iterator[torch.device]:
    """This process is a rank of a world of GPUs that are not there: needs a CUDA build of PyTorch, and no GPU.

    Tensors have a shape, a dtype and a device, and no numbers: reading one, as a device sync does, raises. Collectives
    take their arguments and do nothing.
    """
    # Here and not above: it imports numpy, which real ranks do without.
    from torch.distributed.tensor import debug

    # DTensor keeps the specs of operations, with meshes whose groups were those of an earlier world.
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with real_hosts(), mock.patch("torch.cuda.set_device"), FakeTensorMode(allow_non_fake_inputs=True):
            yield torch.device("cuda")
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


@contextmanager
def real_hosts() -> Iterator[None]:
    """What the host reads, from other hosts and of the mesh, is real although tensors are fake."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(device_mesh, "init_device_mesh", _real(device_mesh.init_device_mesh)))
        for name in HOST_CALLS:
            patches.enter_context(mock.patch.object(Agreement, name, _real(getattr(Agreement, name))))
        for name in PLANNING:
            patches.enter_context(mock.patch.object(muon, name, _real(getattr(muon, name))))
        yield


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called
