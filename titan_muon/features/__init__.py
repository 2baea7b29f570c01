"""Optional features of a step. To delete an option, delete its file and its lines here and in `engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..options import MuonOptions, OptionError
from ..plan.search.tensor_parallel import blocks_reason
from ..state.eight_bit import check_eight_bit
from ..state.host import check_offload
from ..state.momentum import check_not_owned
from ..state.plan_context import PlanContext
from ..step.algorithm import Algorithm
from ..tensors.mesh import without_groups
from ..tensors.warning import warn

# Imports are local, so that a step without an option imports none of the option's code.


def check_plan(context: PlanContext, algorithm: Algorithm) -> None:
    """Raise OptionError if an algorithm or an option cannot run a plan. Equal on all ranks."""
    for check in (*_checks(context.options), algorithm.check):
        check(context)
    _check_whole(context, algorithm)
    if note := blocks_reason(context.options, context.parameters, context.plan.parameters):
        warn(f"{note}; the other modes are exact")


def _checks(options: MuonOptions) -> Iterator[Callable[[PlanContext], None]]:
    yield lambda context: check_offload(context.parameters, context.options)
    yield check_eight_bit
    yield check_not_owned
    yield _check_prescaled
    yield _check_travels
    if options.fused:
        from ..algorithms import fused

        yield fused.check
    if options.overlap == "backward":
        from . import backward

        yield backward.check


def _check_travels(context: PlanContext) -> None:
    """Raise OptionError for options of the exchange if owned parameters leave nothing to exchange."""
    owned = [fqn for fqn, tensor in context.named if without_groups(tensor)]
    for name in ("overlap", "exchange") if owned and not context.plan.buckets else ():
        value, default = getattr(context.options, name), getattr(MuonOptions(), name)
        if value != default:
            raise OptionError(
                name,
                f"= {value!r} has no effect: the owner of an owned parameter stores the whole matrix "
                f"({', '.join(owned[:5])}), and no other matrix travels; set {default!r}",
            )


def _check_prescaled(context: PlanContext) -> None:
    """Raise OptionError for coefficients with a scaling if the iteration does not scale."""
    scaled = [iteration.name for iteration in context.iterations if iteration.prescaled]
    if scaled and (context.sliced or context.options.orthogonalize == "reference"):
        raise OptionError(
            "ns_coefficients",
            f"= {scaled[0]!r} begins with a scaling of whole matrices, which orthogonalize = 'reference' and slices do "
            f"not have{_sliced(context)}; choose another set, or orthogonalize = 'auto' and split_over = 1",
        )


def _check_whole(context: PlanContext, algorithm: Algorithm) -> None:
    """Raise OptionError if an algorithm with states gets slices of matrices."""
    options, needs_whole = context.options, bool(algorithm.states(1, 1, transposed=False))
    if needs_whole and (context.sliced or options.tensor_parallel != "owner"):
        raise OptionError(
            "algorithm",
            f"= {options.algorithm!r} needs whole matrices{_sliced(context)}; set split_over = 1 and tensor_parallel = "
            "'owner'",
        )


def _sliced(context: PlanContext) -> str:
    names = context.sliced[:5]
    return f", and these parameters are sliced: {', '.join(names)}" if names else ""
