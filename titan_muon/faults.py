"""What keeps a parameter from being updated in a step: missing, misplaced and non-finite gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .dtensor import local
from .params import TrainedParam, placement_key


class Fault(IntEnum):
    """What is wrong with a parameter in this step; of several ranks' faults the largest counts."""

    NONE = 0
    NOT_FINITE = 1
    NO_GRADIENT = 2
    GRADIENT_ELSEWHERE = 3
    RESHARDED = 4
    NEWTON_SCHULZ_CHANGED = 5
    STATE_REPLACED = 6


REMEDIES: Mapping[Fault, str] = {
    Fault.NOT_FINITE: "{names}: gradient or momentum was not finite in an earlier step, whose update of those matrices "
    "was zero; lower the learning rate, clip gradients, or go on without those updates (nonfinite = 'skip')",
    Fault.NO_GRADIENT: "no gradient for {names}: use the parameter in the loss, freeze it before building Muon "
    "(requires_grad = False), give it to another optimizer, or skip it in such steps (missing_grad = 'skip')",
    Fault.GRADIENT_ELSEWHERE: "{names}: the gradient's mesh or placements differ from the parameter's; redistribute "
    "the gradient",
    Fault.RESHARDED: "{names}: resharded since Muon was built; build a new optimizer",
    Fault.NEWTON_SCHULZ_CHANGED: "{names}: ns_steps, ns_coefficients or eps changed since Muon was "
    "built; build it anew",
    Fault.STATE_REPLACED: "{names}: the momentum was replaced or moved since Muon was built, and steps would train "
    "the old one; load it with load_state_dict, or move it with offload() and reload()",
}


def fault_of(trained: TrainedParam, average: Tensor | None) -> Fault:
    """What is wrong with a parameter on this rank now, and with `average`, which the optimizer has as its momentum."""
    grad = trained.param.grad
    # A rank outside of the mesh gets no gradient in backward, and needs none.
    if not trained.here:
        return Fault.NONE
    if placement_key(trained.param) != trained.key or not local(trained.param).is_contiguous():
        return Fault.RESHARDED
    # The step goes on with the tensor that it was built for: it would train one, and checkpoints save another.
    if average is not trained.average or local(average).device.type != trained.average_device:
        return Fault.STATE_REPLACED
    if grad is None:
        return Fault.NO_GRADIENT
    return Fault.NONE if placement_key(grad) == trained.key else Fault.GRADIENT_ELSEWHERE


def check_faults(params: Sequence[TrainedParam], faults: Sequence[Fault], allowed: Collection[Fault]) -> None:
    """Raise ValueError naming the parameters with a fault that is not `allowed`, and what to do."""
    for fault, remedy in REMEDIES.items():
        names = names_with(params, faults, fault)
        if names and fault not in allowed:
            raise ValueError(remedy.format(names=names))


def names_with(params: Sequence[TrainedParam], faults: Sequence[Fault], fault: Fault) -> str:
    """The names of the parameters with a fault, the first five of many; empty if there are none."""
    names = [trained.fqn for trained, found in zip(params, faults, strict=True) if found == fault]
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


class NonfiniteCounter:
    """Counts matrices that were not finite on the device, and tells the host without waiting for it.

    To ask the device in the step would be to wait for all that is queued there. So the counts are copied to the host at
    the end of a step and read at the beginning of the next, when the copy has long been done.

    Args:
        parameters: number of parameters.
        device: device on which matrices are orthogonalized.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        self._counts = torch.zeros(parameters, dtype=torch.int32, device=device)
        copied = device.type != "cpu"
        self._on_host = torch.zeros_like(self._counts, device="cpu", pin_memory=True) if copied else self._counts
        self._sent = torch.Event(device) if copied else None

    def add(self, parameters: Tensor, broken: Tensor) -> None:
        """Count matrices, (count,) bool, for their parameters, (count,) int64 indices on the device."""
        self._counts.index_add_(0, parameters, broken.to(torch.int32))

    def send(self) -> None:
        """Start the copy to the host."""
        if self._sent is not None:
            self._on_host.copy_(self._counts, non_blocking=True)
            self._sent.record()

    def read(self) -> list[int]:
        """Matrices that were not finite since the last `clear`, by parameter, as of the last `send`."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._on_host.tolist()

    def clear(self) -> None:
        """Start counting from zero, so that what was not finite is told once."""
        self._counts.zero_()
        self._on_host.zero_()
