"""Process groups by private parts of PyTorch. `tests/unit/tensors/test_process_groups.py` checks each version."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> dist.Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group, by default of the default group."""
    # torch 2.14 has the public name.
    getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(timeout, group)


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta | None:
    """The timeout of a group's backend for a type of device; None without this backend."""
    try:
        timeout = getattr(group._get_backend(torch.device(device)).options, "_timeout", None)
    except (AttributeError, RuntimeError):
        # The fake backend has no options.
        return None
    return timeout if isinstance(timeout, timedelta) else None


def backends() -> dict[str, str]:
    """Backends of the default process group by type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def fast_options(device: str, timeout: timedelta | None) -> Any | None:
    """Options for a new group with high-priority kernels; None without NCCL on the device."""
    # torch 2.15 has several backends of NCCL, with these options.
    if not backends().get(device, "").startswith("nccl"):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        # Without the same value in the options, new_group warns.
        options._timeout = timeout
    return options
