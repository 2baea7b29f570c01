"""Checks the gradient norm of every step, reported or not: a norm that is not finite ends the run."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.titan.device import arrives_late

LISTED = 5
"""Limit on the parameters per rank in an error text."""


class NormWatch:
    """Reads each step's norm without a host wait: on a GPU, in the next step.

    Args:
        names: this rank's parameters, in the order of the local norms.
        device: device of the norms.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = names
        self._on_device = arrives_late(device)
        self._host = torch.zeros((), dtype=torch.float64, pin_memory=self._on_device)
        module: Any = torch.get_device_module(device)
        self._arrived = module.Event() if self._on_device else None
        self._local_norms: Tensor | None = None
        self._step = 0

    @property
    def is_late(self) -> bool:
        """Whether a norm is known only in the next step."""
        return self._on_device

    def watch(self, step: int, norm: Tensor, local_norms: Tensor) -> None:
        """Record a step's norm over all ranks, (), and this rank's norms by parameter, both on the device."""
        self._step, self._local_norms = step, local_norms
        self._host.copy_(norm, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def fault(self, group: dist.ProcessGroup | None) -> str | None:
        """Error text for the last watched norm, with the parameters of all ranks; None if finite or read before.

        All ranks of `group` (gloo; None: one process) call this together.
        """
        if self._local_norms is None:
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
        local_norms, self._local_norms = self._local_norms, None
        norm = float(self._host)
        if math.isfinite(norm):
            return None
        broken = [name for name, n in zip(self._names, local_norms.tolist(), strict=True) if not math.isfinite(n)]
        everywhere: list[Sequence[str]] = [broken]
        if group is not None:
            everywhere = [()] * dist.get_world_size(group)
            dist.all_gather_object(everywhere, broken, group=group)
        shown = "; ".join(f"{_listed(names)} on rank {rank}" for rank, names in enumerate(everywhere) if names)
        return f"step {self._step}: the norm of the gradients is {norm}, because of {shown or 'its own size'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
