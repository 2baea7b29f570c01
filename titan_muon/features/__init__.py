"""Options that wrap the stages of a step. Deleting an option takes its file and its lines here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..comm.agreement import Agreement
from ..options import MuonOptions, OptionError
from ..plan.terms.types import Plan
from ..step.feature import Feature
from ..step.stages import RankStages

# An option imports the file of its feature, so that a step without the option runs none of the code.


def features_of(
    options: MuonOptions, rank: RankStages, agreement: Agreement, previous: Sequence[Feature] = ()
) -> Iterator[Feature]:
    """The features of these options. A feature wraps the stages of the features before it.

    `previous` are the features of a replaced engine, because hooks of a model may refer to them.
    """
    if any(matrix.slice is not None for matrix in rank.plan.matrices):
        from .slices import Slices

        yield Slices(rank, agreement)
    if options.overlap == "backward":
        from .early import EarlyGathers

        yield EarlyGathers(rank)
    if options.overlap == "forward":
        from .late import LateApplies

        yield next((feature for feature in previous if isinstance(feature, LateApplies)), None) or LateApplies()
    if options.offload != "none":
        from .host import HostOffload

        yield HostOffload(options.offload)


def needs_exclusive_groups(options: MuonOptions) -> bool:
    """Whether gathers and returns need their own process groups, because backward launches them beside FSDP's."""
    return options.overlap == "backward"


def check_features(options: MuonOptions, plan: Plan, owned: Sequence[str]) -> None:
    """Raise OptionError if a feature cannot run the plan. `owned`: names of parameters under owned placement."""
    if options.overlap != "none" and owned and not plan.buckets:
        raise OptionError(
            "overlap",
            f"= {options.overlap!r} has nothing to {'gather' if options.overlap == 'backward' else 'return'} in "
            f"{options.overlap}: owned parameters are whole where they are orthogonalized ({', '.join(owned[:5])}), "
            "and no other matrix travels; set 'none'",
        )
    if options.overlap == "backward":
        from .early import EarlyGathers

        EarlyGathers.check(plan)
