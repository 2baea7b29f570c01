"""The private parts of PyTorch that owned placement needs.

`tests/unit/owned/test_private.py` fails on a version of PyTorch where one of them is gone or does something else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor

from ..tensors.mesh import MeshWithoutGroups


class OwnerMesh(MeshWithoutGroups):
    """The ranks that hold an owned parameter. Ranks outside of the mesh have it too, as non-participants.

    Attributes:
        data: data-parallel mesh of this rank, with the ranks that own the parameter in its last axis.
        owners: those ranks.
        inner: mesh of tensor parallelism that this rank's piece of the whole parameter is on, or None.
        holders: for each owner the rank of `inner` that holds all pieces; None if every rank holds its own.
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
        holders: tuple[int, ...] | None = None,
    ) -> None:
        self.data, self.owners, self.inner, self.holders = data, owners, inner, holders
        super().__init__(data.device_type, ranks, names)


def joint_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh whose axes are those of two slices of one mesh. FSDP2 does so for parameters with tensor parallelism."""
    return DeviceMesh._concatenate([outer, inner])


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh on one axis, with a process group of them; every rank of the mesh's root calls this."""
    return mesh._flatten()


def stored_tensor(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor has here, whose memory may be replaced; `to_local` may give another one with it."""
    assert isinstance(tensor, DTensor), "an owned parameter is a DTensor"
    return tensor._local_tensor


def unchanged_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """From this call, and not from its own start, to its end this context keeps autograd from counting writes."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def backward_pass() -> int | None:
    """A number for the backward pass that this thread is in, or None.

    A forward hook that runs within one does so because activations are computed again.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward pass that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has registered, which autograd calls of a leaf with a new gradient."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend for a device launches several operations as one."""
    return bool(group._get_backend(device).supports_coalescing)


def coalesced(group: ProcessGroup, device: torch.device) -> AbstractContextManager[Any]:
    """A context whose operations on a group are launched as one at its end, and must not raise.

    Without a device only some kinds of operations would be, broadcasts and reductions not among them.
    """
    return _coalescing_manager(group, device)
