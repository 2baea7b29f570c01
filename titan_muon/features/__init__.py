"""Optional features of a step: their checks, and the seams of the step where they enter.

To delete an option, delete its file and its lines here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from ..options import MuonOptions, OptionError
from ..state.matrix_states import MatrixStates
from ..step.algorithm import Algorithm, PlanContext
from ..step.rank import Rank
from ..step.step import Hook, MuonStep, UpdateMask
from ..step.views import build_views
from ..tensors.process_groups import without_groups

if TYPE_CHECKING:
    from .forward import ForwardUpdates

# Imports are local, so that a step without an option imports none of the option's code.


def overlap_of(options: MuonOptions) -> ForwardUpdates | None:
    """What ends the late buckets of a step. None: the step."""
    if options.overlap == "none":
        return None
    from .forward import ForwardUpdates

    return ForwardUpdates()


class StepParts:
    """A rank's step with the features of its options.

    `workspace`, `offload`: memory of assembled matrices, and the transfers of tensors on the host, if any.
    """

    def __init__(
        self,
        rank: Rank,
        algorithm: Algorithm,
        states: MatrixStates,
        overlap: ForwardUpdates | None,
        before: StepParts | None,
    ) -> None:
        """`before`: the parts for earlier storage of the same plan."""
        self.rank, options, hooks = rank, rank.options, list[Hook]()
        whole = algorithm.whole
        if options.fused:
            from ..algorithms.fused import Fused, Tables

            tables = Tables(rank)
            algorithm = Fused(algorithm, tables)
            hooks.append(tables)
        if algorithm.sums_norms:
            from .weight_norms import WeightNorms

            algorithm = weight_norms = WeightNorms(algorithm, rank)
            norms = weight_norms.norms.items()
            states = {**states, **{number: {**states.get(number, {}), **norm} for number, norm in norms}}
            hooks.append(weight_norms)
        views, self.workspace, self.flags = build_views(rank, whole, states)
        self.offload = None
        if options.offload != "none":
            from .offload import HostOffload

            self.offload = HostOffload(rank, views, options.offload)
            views = self.offload.views
            hooks.append(self.offload)
        mask, self.idle = UpdateMask(rank.report), None
        if options.idle == "hold":
            from .mask import GradientMask, IdleSteps

            counted = None if before is None else before.idle
            self.idle = counted or IdleSteps(rank.plan, rank.device)
            mask = GradientMask(rank, views, self.idle)
            hooks.append(mask)
        rank.report.watch(self.flags)
        if options.state_dtype == "int8":
            from .eight_bit import EightBit

            # Outermost, because restored numbers would not fit restored scales.
            algorithm = EightBit(algorithm, rank)
        self.reads_flag = algorithm.reads_flag
        seams = algorithm, mask, overlap, self.offload, hooks
        self.step = MuonStep(rank.program, views, rank.exchange, rank.report, *seams)


def check_plan(context: PlanContext, algorithm: Algorithm) -> None:
    """Raise OptionError if an algorithm or an option cannot run a plan. Equal on all ranks."""
    parts: dict[Algorithm, list[int]] = {}
    for number in range(len(context.named)):
        parts.setdefault(algorithm.for_parameter(number), []).append(number)
    for part, numbers in parts.items():
        own = context.part(part.options.algorithm, numbers)
        for check in (*_checks(own.options, part), part.check):
            check(own)
    _check_travels(context)


def _checks(options: MuonOptions, algorithm: Algorithm) -> Iterator[Callable[[PlanContext], None]]:
    if options.offload != "none":
        from . import offload

        yield offload.check
    if options.state_dtype == "int8":
        from . import eight_bit

        yield eight_bit.check
    yield _check_owned
    if options.fused:
        from ..algorithms import fused

        yield fused.check
    if algorithm.sums_norms:
        from . import weight_norms

        yield weight_norms.check


UNSCALED = frozenset({"muon", "muoneq", "muoneq_both", "muoneq_columns", "muonh"})
"""Algorithms without an average of squares."""


def check_used(options: MuonOptions, algorithms: Collection[str]) -> None:
    """Raise OptionError for an option without effect on these algorithms, of all groups: a frozen one may thaw."""
    for name, needed, is_used in (
        ("beta2", "algorithm = 'normuon', 'adamuon' or 'soap'", not UNSCALED.issuperset(algorithms)),
        ("soap_freq", "algorithm = 'soap'", "soap" in algorithms),
        ("momentum_start", "momentum_warmup_steps", options.momentum_warmup_steps > 0),
    ):
        value = getattr(options, name)
        if not is_used and value != getattr(MuonOptions, name):
            raise OptionError(name, f"= {value} has no effect without {needed}; set both, or neither")


def _check_owned(context: PlanContext) -> None:
    """Raise OptionError for `state = "owner"` with an owned parameter."""
    for fqn, tensor in context.named if context.options.state == "owner" else ():
        if without_groups(tensor):
            problem = f"{fqn} is owned, and its momentum is on its owner alone already"
            raise OptionError("state", f'= "owner": {problem}; set "replicated"')


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
