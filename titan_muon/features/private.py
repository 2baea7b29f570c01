"""Private parts of FSDP2 for updates in forward. `tests/unit/fsdp/test_forward.py` checks each PyTorch version."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor


class GatheredGroup:
    """One FSDP2 parameter group: the parameters in one all-gather."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def name(self) -> str:
        return self._group._module_fqn or "the root module"

    def params(self) -> list[DTensor]:
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def is_gathered(self) -> bool:
        """Whether an all-gather has read the parameters, without a reshard since."""
        return bool(self._group.is_unsharded) or self._group._all_gather_result is not None

    def computing_stream(self) -> Any:
        return torch.get_device_module(self._group.device).current_stream()

    def reading_stream(self) -> Any:
        group, comm = self._group, self._group.comm_ctx
        # FSDP2 copies a single shard on the computing stream, and creates other streams in the root's first forward.
        sharded = isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size > 1
        if not sharded or not hasattr(comm, "all_gather_copy_in_stream"):
            return self.computing_stream()
        return comm.get_all_gather_streams(group.unshard_async_op, TrainingState.FORWARD)[0]


def own_groups(module: FSDPModule) -> list[GatheredGroup]:
    """The parameter groups of a module."""
    return _groups_of(module._get_fsdp_state())


def prefetched_groups(module: FSDPModule) -> list[GatheredGroup]:
    """The groups that a module's forward prefetches, by `set_modules_to_forward_prefetch`."""
    states = module._get_fsdp_state()._states_to_forward_prefetch
    return [group for state in states for group in _groups_of(state)]


def keeps_parameters_on_host(module: FSDPModule) -> bool:
    """Whether CPUOffloadPolicy keeps a module's parameters in host memory."""
    return any(isinstance(group._group.offload_policy, CPUOffloadPolicy) for group in own_groups(module))


def _groups_of(state: Any) -> list[GatheredGroup]:
    # Before torch 2.12 a module has a single group, or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [GatheredGroup(group) for group in groups if group is not None]
