"""The update rules of the engine. To delete a rule, delete its file and its name below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module

from .. import registry
from ..options import MuonOptions, OptionError
from ..plan.terms.types import Plan
from ..state.rule_states import StateSpec
from ..step.rule import Rule

RULES: Mapping[str, str] = {
    "muon": "MuonRule",
    "normuon": "NorMuonRule",
    "muonh": "MuonHRule",
    "adamuon": "AdaMuonRule",
}
"""The class of each rule, in the file with the rule's name."""


def _made(name: str, options: MuonOptions) -> Rule:
    """Imports the rule's file at the first use."""
    rule: Rule = getattr(import_module(f".{name}", __package__), RULES[name])(options)
    return rule


for _name in RULES:
    registry.rules.register(_name, partial(_made, _name))


def rule_of(options: MuonOptions) -> Rule:
    """The rule of the options. Raises OptionError for an unknown rule, and for options that the rule cannot use."""
    try:
        make = registry.rules.get(options.rule)
    except ValueError as error:
        raise OptionError("rule", str(error).removeprefix("rule ")) from error
    rule: Rule = make(options)
    return rule


def rule_states(name: str) -> tuple[StateSpec, ...]:
    """The states of a rule with default options. Raises OptionError for an unknown rule."""
    return rule_of(MuonOptions(rule=name)).states


def check_rule(options: MuonOptions, plan: Plan) -> None:
    """Raise OptionError if the rule needs whole matrices and the plan slices matrices."""
    sliced = sliced_names(plan)
    if rule_of(options).states and (sliced or options.tensor_parallel != "owner"):
        raise OptionError(
            "rule",
            f"= {options.rule!r} needs whole matrices{sliced}; set split_over = 1 and tensor_parallel = 'owner'",
        )


def sliced_names(plan: Plan) -> str:
    """The first five parameters with sliced matrices, for a message; empty without any."""
    sliced: Iterable[int] = {matrix.parameter for matrix in plan.matrices if matrix.slice is not None}
    names = [plan.parameters[index].fqn for index in sorted(sliced)][:5]
    return f", and these parameters are sliced: {', '.join(names)}" if names else ""
