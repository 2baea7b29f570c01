"""Options that wrap the stages of a step: one file each, which can be deleted alone with its lines here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..comm.agreement import Agreement
from ..options import MuonOptions, OptionError
from ..plan.terms.types import Plan
from ..step.feature import Feature
from ..step.stages import RankStages

# A feature's file is imported only when an option asks for the feature, so that none of its code runs otherwise.


def features_of(
    options: MuonOptions, rank: RankStages, agreement: Agreement, previous: Sequence[Feature] = ()
) -> Iterator[Feature]:
    """The features that the options ask for. Each wraps the stages of those before it.

    `previous` are the features of an engine that is replaced: hooks of a model may refer to them.
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


def needs_apart(options: MuonOptions) -> bool:
    """Whether gathers and returns need process groups that nothing else uses: backward launches them beside others."""
    return options.overlap == "backward"


def check_features(options: MuonOptions, plan: Plan, owned: Sequence[str]) -> None:
    """Raise OptionError for a plan that a feature cannot run. `owned`: names of parameters under owned placement."""
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
