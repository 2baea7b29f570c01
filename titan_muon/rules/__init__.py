"""The update rules of the engine. To delete a rule, delete a file and the lines below."""

from __future__ import annotations

from collections.abc import Iterable

from ..options import MuonOptions, OptionError
from ..plan.terms.types import Plan
from ..step.rule import Rule
from .muon import MuonRule


def rule_of(options: MuonOptions) -> Rule:
    """The rule of the options."""
    if options.rule == "normuon":
        from .normuon import NorMuonRule

        return NorMuonRule(options.beta2, cautious=options.cautious)
    return MuonRule(cautious=options.cautious)


def check_rule(options: MuonOptions, plan: Plan) -> None:
    """Raise OptionError if the rule needs whole matrices and the plan slices matrices."""
    sliced = sliced_names(plan)
    if rule_of(options).states and (sliced or options.tensor_parallel in ("duplicated", "blockwise")):
        raise OptionError(
            "rule",
            f"= {options.rule!r} needs whole matrices{sliced}; set split_over = 1 and tensor_parallel = 'owner'",
        )


def sliced_names(plan: Plan) -> str:
    """The names of the first five parameters with sliced matrices, for a message; empty without any."""
    sliced: Iterable[int] = {matrix.parameter for matrix in plan.matrices if matrix.slice is not None}
    names = [plan.parameters[index].fqn for index in sorted(sliced)][:5]
    return f", and these parameters are sliced: {', '.join(names)}" if names else ""
