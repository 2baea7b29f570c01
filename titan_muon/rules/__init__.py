"""The update rules of the engine. Deleting a rule takes its file and its lines here."""

from __future__ import annotations

from collections.abc import Iterable

from ..options import MuonOptions, OptionError
from ..plan.terms.types import Plan
from ..step.rule import Rule
from .muon import MuonRule


def rule_of(options: MuonOptions) -> Rule:
    """The rule that the options name."""
    if options.rule == "normuon":
        from .normuon import NorMuonRule

        return NorMuonRule(options.beta2, cautious=options.cautious)
    return MuonRule(cautious=options.cautious)


def check_rule(options: MuonOptions, plan: Plan) -> None:
    """Raise OptionError if the rule reads whole matrices and the plan slices them."""
    parts = sliced_names(plan)
    if rule_of(options).states and (parts or options.tensor_parallel in ("duplicated", "blockwise")):
        raise OptionError(
            "rule",
            f"= {options.rule!r} reads whole matrices at one owner each{parts}; set split_over = 1 and "
            "tensor_parallel = 'owner'",
        )


def sliced_names(plan: Plan) -> str:
    """The names of the first parameters whose matrices are sliced, for a message; empty if there are none."""
    sliced: Iterable[int] = {matrix.parameter for matrix in plan.matrices if matrix.slice is not None}
    names = [plan.parameters[index].fqn for index in sorted(sliced)][:5]
    return f", and these are sliced: {', '.join(names)}" if names else ""
