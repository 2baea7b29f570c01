"""Faults that keep a step from updating a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ..tensors.dtensor import local
from ..tensors.names import listed, warn
from ..tensors.storage import TrainedParam, placement_key


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Of norms of the tensors: float32, because neighbours in bfloat16 are far apart; float64 if any is in float64."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


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
    CONVERTED = 11
    THAWED = 12
    HYPERPARAMETERS_DIFFER = 15
    STEPS_DIFFER = 16
    ZERO_WEIGHTS = 17
    SPARSE_GRADIENT = 18
    HIGHEST_RATE_UNKNOWN = 19


STORAGE_FAULTS = frozenset((Fault.RESHARDED, Fault.STATE_REPLACED, Fault.PARAMETER_REPLACED, Fault.CONVERTED))
"""Faults after which the storage is unknown."""

REMEDIES: Mapping[Fault, str] = {
    Fault.NOT_FINITE: "{names}: gradient or momentum was not finite in an earlier step, which left those matrices "
    "without an update; lower the learning rate, clip gradients, or skip such steps "
    "(expert.on_bad_gradient = 'skip_step')",
    Fault.NO_GRADIENT: "no gradient for {names}: use the parameter in the loss, freeze it before building Muon "
    "(requires_grad = False), give it to another optimizer, or skip it in such steps "
    "(expert.on_bad_gradient = 'skip_missing'); if the parameter was frozen after Muon was built, call rebuild() on "
    "every rank; if the model was sharded after Muon was made, make Muon from the sharded model's parameters",
    Fault.GRADIENT_ELSEWHERE: "{names}: the gradient's mesh or placements differ from the parameter's; redistribute "
    "the gradient",
    Fault.RESHARDED: "{names}: resharded since Muon was built; build a new optimizer, and load its momentum from a "
    "checkpoint",
    Fault.NEWTON_SCHULZ_CHANGED: "{names}: ns_steps, ns_coefficients, eps or algorithm changed since Muon was built; "
    "call rebuild() on every rank",
    Fault.STATE_REPLACED: "{names}: the momentum was replaced or moved since Muon was built, and steps would train "
    "the old tensor; load momentum with load_state_dict, and move it only with the optimizer's own methods",
    Fault.PARAMETER_REPLACED: "{names}: another tensor took its place in param_groups, and steps would train the old "
    "tensor; shard and replace the model's parameters before the first step, or call rebuild() on every rank",
    Fault.SKIPPED: "{names}: GradScalers of only some ranks have found gradients that are not finite, so that a step "
    "changed nothing, and scales differ from now on; use ShardedGradScaler of "
    "torch.distributed.fsdp.sharded_grad_scaler, which tells all ranks, and go on from a checkpoint",
    Fault.REPLICAS_DIFFER: "{names}: these plain tensors were equal on all ranks when Muon was built, but their "
    "gradients differ, and a step applies one rank's gradient to all replicas; reduce gradients over the ranks, as "
    "DistributedDataParallel does, or have each rank train its own tensors (expert.replicas = 'redundant')",
    Fault.CONVERTED: "{names}: its dtype or its device changed since Muon was built; call rebuild() on every rank",
    Fault.THAWED: "parameters that were frozen when the optimizer was built need a gradient now; call rebuild() on "
    "every rank, or freeze them again (requires_grad = False)",
    Fault.HYPERPARAMETERS_DIFFER: "hyperparameters differed between ranks in the last step: {details}; set the same "
    "values on every rank, and continue from a checkpoint",
    Fault.STEPS_DIFFER: "ranks took different numbers of steps since Muon was built: {details}; call step() equally "
    "often on every rank, also where an error was caught, and continue from a checkpoint",
    Fault.ZERO_WEIGHTS: "{names}: a matrix of zeros, which keeps the norm 0 under algorithm = 'muonh' and never "
    "changes; initialize the weights, or give the parameter to another optimizer",
    Fault.SPARSE_GRADIENT: "{names}: the gradient is sparse, and Muon takes dense matrices; set sparse = False in the "
    "embedding, or give it to torch.optim.SparseAdam",
    Fault.HIGHEST_RATE_UNKNOWN: "{names}: expert.decay_follows_lr = True needs the highest rate of the schedule, "
    "which is unknown: no scheduler runs, or its first rate is not the highest; set group['max_lr'] to the highest "
    "rate for each group of param_groups, or expert.decay_follows_lr = False",
}


def fault_of(trained: TrainedParam, param: Tensor | None, momentum: Tensor | None, *, in_place: bool) -> Fault:
    """The fault of a parameter. `param`, `momentum`: the current tensors. `in_place`: whether the views are valid."""
    # A rank outside of the mesh gets no gradient in backward.
    if not trained.on_mesh:
        return Fault.NONE
    if param is not trained.param:
        return Fault.PARAMETER_REPLACED
    # The step would advance the old tensor, and checkpoints would save the new tensor.
    if momentum is not trained.momentum_buffer and not (momentum is not None and _replaces(momentum, trained.momentum)):
        return Fault.STATE_REPLACED
    if not in_place:
        shard = local(trained.param)
        if placement_key(trained.param) != trained.key or not shard.is_contiguous():
            return Fault.RESHARDED
        if (shard.dtype, shard.device) != trained.stored:
            return Fault.CONVERTED
        stored = local(trained.momentum)
        if stored.device.type != trained.momentum_device or not stored.is_contiguous():
            return Fault.STATE_REPLACED
    grad = trained.param.grad
    if grad is None:
        return Fault.NO_GRADIENT
    if grad.layout != torch.strided:
        return Fault.SPARSE_GRADIENT
    return Fault.NONE if placement_key(grad) == trained.key else Fault.GRADIENT_ELSEWHERE


def _replaces(new_momentum: Tensor, momentum: Tensor) -> bool:
    """Whether a new tensor can replace the momentum, as after a round trip to the host."""
    new, old = local(new_momentum), local(momentum)
    equal = (new.dtype, new.device) == (old.dtype, old.device) and new.is_contiguous()
    return equal and placement_key(new_momentum) == placement_key(momentum)


class NotFiniteError(ValueError, FloatingPointError):
    """Training has diverged."""


def check_faults(names: Sequence[str], faults: Sequence[Fault], allowed: Collection[Fault], details: str = "") -> None:
    """Raise ValueError with names and remedy for the first fault outside `allowed`."""
    for fault, remedy in REMEDIES.items():
        faulty = names_with(names, faults, fault)
        if faulty and fault not in allowed:
            kind = NotFiniteError if fault is Fault.NOT_FINITE else ValueError
            raise kind(remedy.format(names=faulty, details=details))


ALLOWED: Mapping[str, tuple[Fault, ...]] = {
    "error": (),
    "skip_missing": (Fault.NO_GRADIENT,),
    "skip_step": (Fault.NOT_FINITE, Fault.NO_GRADIENT),
}
"""Faults that do not raise, by `on_bad_gradient`."""


def warn_of_skipped(names: Sequence[str], faults: Sequence[Fault]) -> None:
    """Warn of the gradients for which a step was skipped."""
    for fault, problem in ((Fault.NOT_FINITE, "the gradient was not finite"), (Fault.NO_GRADIENT, "no gradient")):
        if faulty := names_with(names, faults, fault):
            warn(f"{faulty}: {problem}, and the step changed nothing on any rank")


def names_with(names: Sequence[str], faults: Sequence[Fault], fault: Fault) -> str:
    """The first five names with this fault, and the number of the others."""
    return listed([name for name, current in zip(names, faults, strict=True) if current == fault])
