"""The private parts of FSDP2: what summing over replicas by ourselves needs, and updating weights in forward.

`tests/unit/fsdp/test_fsdp_private.py` fails on a version of PyTorch where one of them is gone or does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllReduceState
from torch.distributed.tensor import DTensor


class FlatGradient(NamedTuple):
    """The gradient of a parameter's shard in the flat tensor: its elements, and those with padding behind them."""

    param: DTensor
    elements: int
    padded: int


class HSDPGroup:
    """Parameters of a module whose gradients FSDP2 reduce-scatters together, and all-reduces over replicas."""

    def __init__(self, group: Any, name: str) -> None:
        self._group, self._name = group, name
        self.replicate_group: dist.ProcessGroup = group.mesh_info.replicate_process_group

    @property
    def name(self) -> str:
        """The module's name: FSDP2's, once a forward has told it, else the one that was given."""
        return self._group._module_fqn or self._name or "the root module"

    @property
    def has_divide_factor(self) -> bool:
        """Whether gradients are divided by a factor that was given, and not by the number of ranks."""
        return self._group.gradient_divide_factor is not None

    @property
    def all_reduces(self) -> bool:
        """Whether gradients are summed over replicas in this backward."""
        return bool(self._group.all_reduce_grads)

    def trained(self) -> Iterator[FlatGradient]:
        """The gradients of the trained parameters, in their order in the flat tensor."""
        for param in self._group.fsdp_params:
            if param.sharded_param.requires_grad:
                sizes = param.sharded_size.numel(), param.padded_sharded_param_size.numel()
                yield FlatGradient(param.sharded_param, *sizes)

    def hold(self, reduced: Tensor) -> None:
        """Keep the memory of gradients that the hook was called with until backward is over."""
        # It is of the stream that reduce-scatters, which would fill it with the next module's gradients while the
        # stream of the hook still sums these. FSDP2 holds what it all-reduces by the same means, from 2.15 on also what
        # a hook was called with.
        self._group._all_reduce_state = AllReduceState(reduced, None)

    def replace_all_reduce(self, hook: Callable[[Tensor], None]) -> None:
        """Have `hook` called with the reduce-scattered gradients in place of FSDP2's all-reduce.

        Raises ValueError if another hook is there.
        """
        group, info = self._group, self._group.mesh_info
        if group._all_reduce_hook is not None:
            raise ValueError(
                f"{self.name}: set_all_reduce_hook has been called; a module has one hook, which "
                "reduce_scatter_replicas needs"
            )
        given = {item.name: getattr(info, item.name) for item in fields(info) if item.init}
        within = FSDPMeshInfo(**(given | {"replicate_mesh_dim": None}))
        within.reduce_scatter_process_group = info.reduce_scatter_process_group
        if group.post_forward_mesh_info is info:
            # Another object would be read as another mesh to keep the parameters on after forward.
            group.post_forward_mesh_info = within
        group.mesh_info = within
        group._all_reduce_hook = hook


def hsdp_groups(module: FSDPModule, name: str = "") -> Iterator[HSDPGroup]:
    """The groups of a module's own parameters that FSDP2 all-reduces over several replicas."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if isinstance(group.mesh_info, HSDPMeshInfo) and group.mesh_info.replicate_mesh_size > 1:
            yield HSDPGroup(group, name)


class GatheredGroup:
    """Parameters of a module that FSDP2 all-gathers together."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def name(self) -> str:
        """The module's name, once a forward has told FSDP2."""
        return self._group._module_fqn or "the root module"

    def params(self) -> list[DTensor]:
        """Its sharded parameters."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters have been read to be all-gathered, and are not resharded since."""
        return bool(self._group.is_unsharded) or self._group._all_gather_result is not None

    def computing_stream(self) -> Any:
        """The stream on which the module computes."""
        return torch.get_device_module(self._group.device).current_stream()

    def reading_stream(self) -> Any:
        """The stream on which a forward reads the sharded parameters."""
        group, comm = self._group, self._group.comm_ctx
        # Of one rank nothing is gathered: what waits for the all-gather copies the shard. And until the root's first
        # forward there is no stream but the computing one, which all others wait for then.
        cut = isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size > 1
        if not cut or not hasattr(comm, "all_gather_copy_in_stream"):
            return self.computing_stream()
        return comm.get_all_gather_streams(group.unshard_async_op, TrainingState.FORWARD)[0]


def own_groups(module: FSDPModule) -> list[GatheredGroup]:
    """What the forward of a module all-gathers of its own."""
    return [GatheredGroup(group) for group in module._get_fsdp_state()._fsdp_param_groups]


def prefetched_groups(module: FSDPModule) -> list[GatheredGroup]:
    """What the forward of a module all-gathers for others, by `set_modules_to_forward_prefetch`."""
    states = module._get_fsdp_state()._states_to_forward_prefetch
    return [GatheredGroup(group) for state in states for group in state._fsdp_param_groups]
