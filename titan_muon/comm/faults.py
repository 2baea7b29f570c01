"""What keeps a parameter from being updated in a step: missing, misplaced and non-finite gradients."""

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
    """What is wrong with a parameter in a step; of several ranks' faults the largest counts."""

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


STORAGE_FAULTS = frozenset((Fault.RESHARDED, Fault.STATE_REPLACED, Fault.PARAMETER_REPLACED, Fault.CONVERTED))
"""After which there is no telling where a parameter and its momentum are stored."""

REMEDIES: Mapping[Fault, str] = {
    Fault.NOT_FINITE: "{names}: gradient or momentum was not finite in an earlier step, whose update of those matrices "
    "was zero; lower the learning rate, clip gradients, or go on without those updates (nonfinite = 'skip')",
    Fault.NO_GRADIENT: "no gradient for {names}: use the parameter in the loss, freeze it before building Muon "
    "(requires_grad = False), give it to another optimizer, or skip it in such steps (missing_grad = 'skip'); if the "
    "model was sharded, or the parameter frozen, after Muon was built, call rebuild() on every rank",
    Fault.GRADIENT_ELSEWHERE: "{names}: the gradient's mesh or placements differ from the parameter's; redistribute "
    "the gradient",
    Fault.RESHARDED: "{names}: resharded since Muon was built; build a new optimizer, and load its momentum from a "
    "checkpoint",
    Fault.NEWTON_SCHULZ_CHANGED: "{names}: ns_steps, ns_coefficients or eps changed since Muon was "
    "built; build it anew",
    Fault.STATE_REPLACED: "{names}: the momentum was replaced or moved since Muon was built, and steps would train "
    "the old one; load it with load_state_dict, or move it with offload() and reload()",
    Fault.PARAMETER_REPLACED: "{names}: another tensor took its place in param_groups, and steps would train the old "
    "one; shard and replace the model's parameters before the first step, or call rebuild() on every rank",
    Fault.SKIPPED: "{names}: some ranks skipped a step that others took, since their GradScalers have found gradients "
    "that are not finite on some ranks alone; let all ranks hear of them, as ShardedGradScaler of "
    "torch.distributed.fsdp.sharded_grad_scaler does, and go on from a checkpoint",
    Fault.REPLICAS_DIFFER: "{names}: these plain tensors were equal on all ranks when Muon was built, but their "
    "gradients differ, and a step applies one rank's gradient to all replicas; reduce gradients over the ranks, as "
    "DistributedDataParallel does, or have each rank train its own (replicas = 'redundant')",
    Fault.GRADIENT_CHANGED: "{names}: gradient, momentum or nesterov changed after they were sent in backward "
    "(overlap = 'backward'), before the step; put the last backward of a step alone into optimizer.overlap() and leave "
    "gradients as they are until the step, without clipping them, or set overlap = 'none'",
    Fault.CONVERTED: "{names}: its dtype or its device changed since Muon was built; call rebuild() on every rank",
    Fault.THAWED: "parameters that were frozen when Muon was built need a gradient now, and get no update; call "
    "rebuild() on every rank, or freeze them again (requires_grad = False)",
}


def fault_of(trained: TrainedParam, given: Tensor | None, average: Tensor | None, *, there: bool) -> Fault:
    """What is wrong with a parameter on this rank now.

    `given` and `average` are what the optimizer has as the parameter and as its momentum; `there` says whether both are
    stored where they were when the views of them were made.
    """
    # A rank outside of the mesh gets no gradient in backward, and needs none.
    if not trained.here:
        return Fault.NONE
    if given is not trained.param:
        return Fault.PARAMETER_REPLACED
    # The step goes on with the tensor that it was built for: it would train one, and checkpoints save another.
    if average is not trained.average and not (average is not None and _replaces(average, trained.momentum)):
        return Fault.STATE_REPLACED
    if not there:
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
    """Whether steps can go on with another tensor as momentum, as after a round trip to the host."""
    new, old = local(average), local(momentum)
    alike = (new.dtype, new.device) == (old.dtype, old.device) and new.is_contiguous()
    return alike and placement_key(average) == placement_key(momentum)


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


class FaultReport:
    """What was wrong with each parameter in a step on any rank, told to all of them without waiting.

    To ask the device or another host in the step would be to wait for all that is queued there. So faults are kept on
    the device, the largest over the ranks goes to the host at the end of the step, and the next one reads it, when it
    has long been there.

    Args:
        parameters: number of parameters.
        device: device on which matrices are orthogonalized.
        agreement: the ranks that are told of each other's faults.
        copies: parameters of which one rank's gradients stand for those of others.
    """

    def __init__(
        self, parameters: int, device: torch.device, agreement: Agreement, replicas: Sequence[int] = ()
    ) -> None:
        # Behind the parameters: the sizes of copies' gradients, and whether a rank has skipped the step or taken it.
        self._parameters, self._replicas, self._scaled = parameters, tuple(replicas), False
        self._found = torch.zeros(parameters + 2 * len(self._replicas) + 2, dtype=torch.int32, device=device)
        self._sizes = self._found[parameters:-2].view(2, -1)
        self._sizes.fill_(NO_SIZE)
        self._told = torch.zeros_like(self._found)
        self._agreement = agreement
        self._work: Work | None = None
        self._copied = device.type != "cpu"
        self._on_host = torch.zeros_like(self._told, device="cpu", pin_memory=True) if self._copied else self._told
        self._module: Any = torch.get_device_module(device)
        self._stream, self._sent = self._module.Stream(), self._module.Event()

    def add_nonfinite(self, parameters: Tensor, broken: Tensor) -> None:
        """Note matrices, (count,) bool, for their parameters, (count,) int64 indices on the device."""
        self._found.scatter_reduce_(0, parameters, broken.to(torch.int32) * Fault.NOT_FINITE, "amax")

    def add_changed(self, parameters: Tensor, changed: Tensor) -> None:
        """Note parameters, (count,) int64 indices on the device, whose gradients changed after they were sent, bool."""
        self._found.scatter_reduce_(0, parameters, changed.to(torch.int32) * Fault.GRADIENT_CHANGED, "amax")

    def add(self, faults: Sequence[Fault]) -> None:
        """Note what this host found wrong with each parameter."""
        if any(faults):
            found = torch.tensor(faults, dtype=torch.int32, device=self._found.device)
            of_parameters = self._found[: self._parameters]
            torch.maximum(of_parameters, found, out=of_parameters)

    def add_skipped(self, skipped: Tensor) -> None:
        """Note whether a GradScaler has this rank skip the step, () bool. All ranks note something, or none does."""
        self._found[-2:] = torch.stack((skipped, skipped.logical_not()))
        self._scaled = True

    def add_gradients(self, stored: Sequence[Tensor | None]) -> None:
        """Note the sizes of the copies' gradients; `stored` are the gradients by parameter."""
        here = [(place, grad) for place, copy in enumerate(self._replicas) if (grad := stored[copy]) is not None]
        if not here:
            return
        found = sizes([grad for _, grad in here])
        if len(here) == len(self._replicas):
            self._sizes.copy_(found)
        else:
            # One by one: an index of several places would come from the host, which would wait for it.
            for (place, _), size in zip(here, found.unbind(1), strict=True):
                self._sizes[:, place].copy_(size)

    def send(self) -> None:
        """Start telling all ranks what was found since the last `send`."""
        self._told.copy_(self._found)
        self._found.zero_()
        self._sizes.fill_(NO_SIZE)
        size = self._told.numel() - (0 if self._scaled else 2)
        self._work = self._agreement.start_max_over_peers(self._told[:size])
        self._scaled = False
        if not self._copied:
            return
        # On a stream of its own: what is computed next need not wait for the ranks that are late.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            if self._work is not None:
                self._work.wait()
            self._on_host.copy_(self._told, non_blocking=True)
            self._sent.record()

    def read(self) -> list[Fault]:
        """The largest fault of each parameter on any rank in the step before; the same on all ranks of the group."""
        if self._copied:
            self._sent.synchronize()
        elif self._work is not None:
            self._work.wait()
        self._work = None
        *told, skipped, taken = self._on_host.tolist()
        faults = [Fault(code) for code in told[: self._parameters]]
        if skipped and taken:
            return [Fault.SKIPPED] * len(faults)
        largest, smallest = (
            told[self._parameters :][: len(self._replicas)],
            told[self._parameters + len(self._replicas) :],
        )
        for copy, most, least in zip(self._replicas, largest, smallest, strict=True):
            if differ(most, least):
                faults[copy] = Fault.REPLICAS_DIFFER
        return faults

    def clear(self) -> None:
        """Forget what was told, so that it is told once."""
        self._on_host.zero_()
