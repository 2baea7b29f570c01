"""Private PyTorch calls of the owned placement, checked by `tests/unit/owned/test_collectives.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..engine.tensors.process_groups import MeshWithoutGroups


class OwnerMesh(MeshWithoutGroups):
    """The holders of an owned parameter; other ranks are non-participants.

    `data`: data-parallel mesh of this rank, with the `owners` on its last axis. `inner`: tensor-parallel mesh for this
    rank's piece, or None.
    """

    refusal = (
        "an owned parameter is neither sharded nor gathered by PyTorch: give fully_shard what own() returned as "
        "ignored_params, read whole parameters with titan_muon.owned.gather, and load a full state dict with "
        "titan_muon.owned.load_full_state_dict"
    )

    def __init__(
        self,
        ranks: Tensor,
        names: tuple[str, ...],
        data: DeviceMesh,
        owners: tuple[int, ...],
        inner: DeviceMesh | None,
    ) -> None:
        self.data, self.owners, self.inner = data, owners, inner
        super().__init__(data.device_type, ranks, names)

    def __repr__(self) -> str:
        # PyTorch's errors about operands on several meshes print the meshes.
        return f"{super().__repr__()} of an owned parameter (clip gradients with titan_muon.clip_grad_norm_)"


def reduce_dtype(policy: MixedPrecisionPolicy, stored: Sequence[torch.dtype]) -> torch.dtype | None:
    """The dtype in which `fully_shard` reduces gradients, or None for the dtype of the unsharded parameters.

    `stored`: the dtypes of the parameters between steps.
    """
    if policy.reduce_dtype is not None or not stored or torch.__version__ < "2.15":
        return policy.reduce_dtype
    return functools.reduce(torch.promote_types, stored)


def joint_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The axes of two slices of a root mesh, as FSDP2 builds for tensor-parallel parameters."""
    return DeviceMesh._concatenate([outer, inner])


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks on a single axis, with a process group; collective over the root mesh."""
    return mesh._flatten()


def unchanged_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keeps autograd from counting writes, from this call (not from `__enter__`) to the context's exit."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def backward_pass() -> int | None:
    """The number of this thread's current backward pass, or None. In a forward hook: activations are recomputed."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue `callback` for the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """The hooks from `register_post_accumulate_grad_hook`."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Whether `coalesced` works with the group's backend."""
    return bool(group._get_backend(device).supports_coalescing)


def coalesced(group: ProcessGroup, device: torch.device) -> AbstractContextManager[Any]:
    """Launches operations as a single kernel at exit; operations must not raise."""
    # Without a device, broadcasts and reductions do not coalesce.
    return _coalescing_manager(group, device)
