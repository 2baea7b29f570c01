"""The private parts of FSDP2 that updates in forward need.

`tests/unit/fsdp/test_fsdp_private.py` fails on a version of PyTorch where one of them is gone or does something else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor


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
