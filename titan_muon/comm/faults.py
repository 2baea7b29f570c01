"""Faults that keep a step from updating a parameter, and their report to all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from ..tensors.dtensor import local
from ..tensors.storage import TrainedParam, placement_key
from .agreement import Agreement
from .replicas import NO_SIZE, differ, sizes


class Fault(IntEnum):
    """A problem of a parameter in a step. Ranks agree on the maximum."""

    NONE = 0
    NOT_FINITE = 1
    NO_GRADIENT = 2
    GRADIENT_ELSEWHERE = 3
    RESHARDED = 4
    NEWTON_SCHULZ_CHANGED = 5
    STATE_REPLACED = 6
    PARAMETER_REPLACED = 7
    SKIPPED = 8
    REPLICAS_DIFFER = 9
    GRADIENT_CHANGED = 10
    CONVERTED = 11
    THAWED = 12
    ZERO_WEIGHTS = 13


STORAGE_FAULTS = frozenset((Fault.RESHARDED, Fault.STATE_REPLACED, Fault.PARAMETER_REPLACED, Fault.CONVERTED))
"""Faults after which the storage of a parameter and its momentum is unknown."""

REMEDIES: Mapping[Fault, str] = {
    Fault.NOT_FINITE: "{names}: gradient or momentum was not finite in an earlier step, which left those matrices "
    "without an update; lower the learning rate, clip gradients, or skip such updates (nonfinite = 'skip')",
    Fault.NO_GRADIENT: "no gradient for {names}: use the parameter in the loss, freeze it before building Muon "
    "(requires_grad = False), give it to another optimizer, or skip it in such steps (missing_grad = 'skip'); if the "
    "parameter was frozen after Muon was built, call rebuild() on every rank; if the model was sharded after Muon was "
    "made, make Muon from the sharded model's parameters",
    Fault.GRADIENT_ELSEWHERE: "{names}: the gradient's mesh or placements differ from the parameter's; redistribute "
    "the gradient",
    Fault.RESHARDED: "{names}: resharded since Muon was built; build a new optimizer, and load its momentum from a "
    "checkpoint",
    Fault.NEWTON_SCHULZ_CHANGED: "{names}: ns_steps, ns_coefficients or eps changed since Muon was built; build a new "
    "optimizer",
    Fault.STATE_REPLACED: "{names}: the momentum was replaced or moved since Muon was built, and steps would train "
    "the old tensor; load momentum with load_state_dict, or move momentum with offload() and reload()",
    Fault.PARAMETER_REPLACED: "{names}: another tensor took its place in param_groups, and steps would train the old "
    "tensor; shard and replace the model's parameters before the first step, or call rebuild() on every rank",
    Fault.SKIPPED: "{names}: only some ranks skipped a step, because GradScalers on some ranks alone have found "
    "gradients that are not finite; use ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler, which tells "
    "all ranks, and go on from a checkpoint",
    Fault.REPLICAS_DIFFER: "{names}: these plain tensors were equal on all ranks when Muon was built, but their "
    "gradients differ, and a step applies one rank's gradient to all replicas; reduce gradients over the ranks, as "
    "DistributedDataParallel does, or have each rank train its own tensors (replicas = 'redundant')",
    Fault.GRADIENT_CHANGED: "{names}: gradient, momentum or nesterov changed between the send in backward "
    "(overlap = 'backward') and the step; put only the last backward of a step into optimizer.overlap(), and do not "
    "clip or change gradients before the step, or set overlap = 'none'",
    Fault.CONVERTED: "{names}: its dtype or its device changed since Muon was built; call rebuild() on every rank",
    Fault.THAWED: "parameters that were frozen when Muon was built need a gradient now, and get no update; call "
    "rebuild() on every rank, or freeze them again (requires_grad = False)",
    Fault.ZERO_WEIGHTS: "{names}: a matrix of zeros, which keeps the norm 0 under rule = 'muonh' and never changes; "
    "initialize the weights, or give the parameter to another optimizer",
}


def fault_of(trained: TrainedParam, param: Tensor | None, average: Tensor | None, *, in_place: bool) -> Fault:
    """The current fault of a parameter on this rank.

    `param` and `average` are the optimizer's current tensors; `in_place`: whether the step's views are still valid.
    """
    # A rank outside of the mesh gets no gradient in backward.
    if not trained.on_mesh:
        return Fault.NONE
    if param is not trained.param:
        return Fault.PARAMETER_REPLACED
    # The step would advance the old tensor, and checkpoints would save the new tensor.
    if average is not trained.average and not (average is not None and _replaces(average, trained.momentum)):
        return Fault.STATE_REPLACED
    if not in_place:
        shard = local(trained.param)
        if placement_key(trained.param) != trained.key or not shard.is_contiguous():
            return Fault.RESHARDED
        if (shard.dtype, shard.device) != trained.stored:
            return Fault.CONVERTED
        stored = local(trained.momentum)
        if stored.device.type != trained.average_device or not stored.is_contiguous():
            return Fault.STATE_REPLACED
    grad = trained.param.grad
    if grad is None:
        return Fault.NO_GRADIENT
    return Fault.NONE if placement_key(grad) == trained.key else Fault.GRADIENT_ELSEWHERE


def _replaces(average: Tensor, momentum: Tensor) -> bool:
    """Whether a new tensor can replace the momentum, as after a round trip to the host."""
    new, old = local(average), local(momentum)
    equal = (new.dtype, new.device) == (old.dtype, old.device) and new.is_contiguous()
    return equal and placement_key(average) == placement_key(momentum)


class NotFiniteError(ValueError, FloatingPointError):
    """Gradients or momentum of some parameters were not finite: training has diverged."""


def check_faults(params: Sequence[TrainedParam], faults: Sequence[Fault], allowed: Collection[Fault]) -> None:
    """Raise ValueError with names and remedy for the first fault outside `allowed`."""
    for fault, remedy in REMEDIES.items():
        names = names_with(params, faults, fault)
        if names and fault not in allowed:
            kind = NotFiniteError if fault is Fault.NOT_FINITE else ValueError
            raise kind(remedy.format(names=names))


def names_with(params: Sequence[TrainedParam], faults: Sequence[Fault], fault: Fault) -> str:
    """The first five names of parameters with this fault, and the number of further names; empty without any."""
    names = [trained.fqn for trained, current in zip(params, faults, strict=True) if current == fault]
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


class FaultReport:
    """Shares the faults of a step among all ranks without blocking the host.

    A step adds faults on the device. At the end, `send` starts a maximum over the ranks, and the next step reads the
    result.

    Args:
        replicas: parameters for which one rank's gradient stands for the gradients of all replicas.
    """

    def __init__(
        self, parameters: int, device: torch.device, agreement: Agreement, replicas: Sequence[int] = ()
    ) -> None:
        # Codes of the parameters, then the gradient sizes of replicas, then two flags: skipped and taken.
        self._parameters, self._replicas, self._scaled = parameters, tuple(replicas), False
        self._codes = torch.zeros(parameters + 2 * len(self._replicas) + 2, dtype=torch.int32, device=device)
        self._sizes = self._codes[parameters:-2].view(2, -1)
        self._sizes.fill_(NO_SIZE)
        self._shared = torch.zeros_like(self._codes)
        self._agreement = agreement
        self._work: Work | None = None
        self._on_device = device.type != "cpu"
        shared = self._shared
        self._on_host = torch.zeros_like(shared, device="cpu", pin_memory=True) if self._on_device else shared
        self._module: Any = torch.get_device_module(device)
        self._stream, self._sent = self._module.Stream(), self._module.Event()

    def add_nonfinite(self, parameters: Tensor, broken: Tensor) -> None:
        """Add non-finite matrices: `parameters` (count,) int64 and `broken` (count,) bool, on the device."""
        self._codes.scatter_reduce_(0, parameters, broken.to(torch.int32) * Fault.NOT_FINITE, "amax")

    def add_changed(self, parameters: Tensor, changed: Tensor) -> None:
        """Add changes after the send: `parameters` (count,) int64 and `changed` (count,) bool, on the device."""
        self._codes.scatter_reduce_(0, parameters, changed.to(torch.int32) * Fault.GRADIENT_CHANGED, "amax")

    def add_zero_weights(self, parameters: Tensor, zero: Tensor) -> None:
        """Add matrices of zeros under a rule that keeps norms: `parameters` and `zero` as in `add_changed`."""
        self._codes.scatter_reduce_(0, parameters, zero.to(torch.int32) * Fault.ZERO_WEIGHTS, "amax")

    def add(self, faults: Sequence[Fault]) -> None:
        if any(faults):
            new = torch.tensor(faults, dtype=torch.int32, device=self._codes.device)
            codes = self._codes[: self._parameters]
            torch.maximum(codes, new, out=codes)

    def add_skipped(self, skipped: Tensor) -> None:
        """Add whether this rank skips the step, () bool. Either all ranks call this or none."""
        self._codes[-2:] = torch.stack((skipped, skipped.logical_not()))
        self._scaled = True

    def add_gradients(self, stored: Sequence[Tensor | None]) -> None:
        """Add the gradient sizes of the replicas; `stored` are the gradients by parameter."""
        grads = {place: grad for place, p in enumerate(self._replicas) if (grad := stored[p]) is not None}
        if not grads:
            return
        new = sizes(list(grads.values()))
        if len(grads) == len(self._replicas):
            self._sizes.copy_(new)
        else:
            # Separate copies, because indexing by a list blocks the host.
            for place, size in zip(grads, new.unbind(1), strict=True):
                self._sizes[:, place].copy_(size)

    def send(self) -> None:
        """Start to share the faults with all ranks."""
        self._shared.copy_(self._codes)
        self._codes.zero_()
        self._sizes.fill_(NO_SIZE)
        size = self._shared.numel() - (0 if self._scaled else 2)
        self._work = self._agreement.start_max_over_peers(self._shared[:size])
        self._scaled = False
        if not self._on_device:
            return
        # The computing stream must not wait for late ranks.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            if self._work is not None:
                self._work.wait()
            self._on_host.copy_(self._shared, non_blocking=True)
            self._sent.record()

    def read(self) -> list[Fault]:
        """By parameter, the maximum fault over all ranks in the last step."""
        if self._on_device:
            self._sent.synchronize()
        elif self._work is not None:
            self._work.wait()
        self._work = None
        *codes, skipped, stepped = self._on_host.tolist()
        faults = [Fault(code) for code in codes[: self._parameters]]
        if skipped and stepped:
            return [Fault.SKIPPED] * len(faults)
        both = codes[self._parameters :]
        count = len(self._replicas)
        for parameter, largest, negative_smallest in zip(self._replicas, both[:count], both[count:], strict=True):
            if differ(largest, negative_smallest):
                faults[parameter] = Fault.REPLICAS_DIFFER
        return faults

    def clear(self) -> None:
        """Clear the result, to report each fault once."""
        self._on_host.zero_()
