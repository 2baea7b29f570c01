"""Options that wrap the stages of a step. To delete an option, delete a file and the lines below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm.agreement import Agreement
from ..options import MuonOptions, OptionError
from ..orthogonalize import measured_choices
from ..plan.terms.types import Plan
from ..step.feature import Feature
from ..step.stages import RankStages

# Imports are local, so that a step without an option runs none of the option's code.


def features_of(
    options: MuonOptions, rank: RankStages, agreement: Agreement, previous: Sequence[Feature] = ()
) -> Iterator[Feature]:
    """The features, innermost first. `previous`: of the old engine, because hooks of a model refer to LateApplies."""
    if options.fused:
        from .fused import Fused

        # Innermost, to replace the calls that other features wrap.
        yield Fused()
    if any(matrix.slice is not None for matrix in rank.plan.matrices):
        from .slices import Slices

        yield Slices(rank, agreement)
    if options.overlap == "backward":
        from .early import EarlyGathers

        yield EarlyGathers(rank)
    if options.overlap == "forward":
        from .late import LateApplies

        yield next((feature for feature in previous if isinstance(feature, LateApplies)), None) or LateApplies()
    if skips(options):
        from .skip import Skips

        # Inside of the offload, to keep tensors on the device.
        yield Skips(agreement, options)
    if options.offload != "none":
        from .host import HostOffload

        yield HostOffload(options.offload)
    if options.idle == "hold":
        from .idle import Idle

        yield Idle(agreement)
    if options.state_dtype == "int8":
        from .eight_bit import EightBit

        # Outside of the rest, to encode their changes of the momentum.
        yield EightBit()
    feature = rank.rule.feature(agreement)
    if feature is not None:
        yield feature


def features_of_step(optimizer: Optimizer, rank: RankStages, skipped: Tensor | None) -> Iterator[Feature]:
    """Features of one step alone. Raises OptionError for options without support for a gradient scale.

    `optimizer`: with `found_inf` of torch.amp.GradScaler. `skipped`: () bool on the device: whether the step changes
    nothing; None for a normal step.
    """
    found_inf: Any = getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        from .scaling import GradScaling

        GradScaling.check(rank.options)
        yield GradScaling(rank, found_inf, getattr(optimizer, "grad_scale", None))
    elif skipped is not None and (skipped.device.type != "cpu" or skipped):
        from .scaling import GradScaling

        yield GradScaling(rank, skipped, None)


def with_fused(options: MuonOptions, device: torch.device, tensors: Iterable[Tensor]) -> MuonOptions:
    """The options with `fused = "auto"` decided: by the measurement of this GPU, if the kernels take the tensors."""
    if options.fused != "auto":
        return options
    from .fused import Fused

    return replace(options, fused=measured_choices(device).fused and Fused.takes(options, device, tensors))


def needs_exclusive_groups(options: MuonOptions) -> bool:
    """See [Note: gathers in backward]."""
    return options.overlap == "backward"


def skips(options: MuonOptions) -> bool:
    """Whether a step may skip matrices, see [Note: skipped matrices]."""
    return "skip" in (options.missing_grad, options.nonfinite)


def skips_missing(options: MuonOptions) -> bool:
    """Whether the replicas of a matrix decide together about a missing gradient."""
    return options.missing_grad == "skip"


def check_features(options: MuonOptions, plan: Plan, owned: Sequence[str], device: str) -> None:
    """Raise OptionError if a feature cannot run the plan on a type of device. `owned`: names of owned parameters."""
    for name in ("overlap", "exchange") if owned and not plan.buckets else ():
        value, default = getattr(options, name), getattr(MuonOptions(), name)
        if value != default:
            raise OptionError(
                name,
                f"= {value!r} has no effect: the owner of an owned parameter stores the whole matrix "
                f"({', '.join(owned[:5])}), and no other matrix travels; set {default!r}",
            )
    if options.fused:
        from .fused import Fused

        Fused.check(options, torch.device(device))
    if options.overlap == "backward":
        from .early import EarlyGathers

        EarlyGathers.check(plan)
