"""Which optimizer takes which parameter, with the reason: rules of the recipe first, then defaults, then the shape."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Parameters whose name matches the glob `match` (`*` also crosses dots) go to `optimizer`, because of `reason`."""

    match: str
    optimizer: str
    reason: str


@dataclass(frozen=True)
class Assignment:
    """The optimizer that takes a parameter. `rule` is the index of the rule that decided, or None for its shape."""

    fqn: str
    shape: tuple[int, ...]
    optimizer: str
    reason: str
    rule: int | None


EMBEDDINGS_AND_HEADS = (
    Rule("*embed*", "adamw", "embedding: its rows are looked up, not multiplied"),
    Rule("*lm_head*", "adamw", "output head"),
    Rule("output.weight", "adamw", "output head"),
)
"""What no shape tells: these are matrices that Muon is not meant for (Keller Jordan, 2024)."""


def default_rules(router: str = "adamw") -> tuple[Rule, ...]:
    """Rules for what a recipe leaves open, before shapes decide. `router` takes the gates of mixtures of experts."""
    return (
        *EMBEDDINGS_AND_HEADS,
        Rule("*.router.*weight", router, "router of a mixture of experts (optimizer.router)"),
    )


def assign(
    parameters: Iterable[tuple[str, Sequence[int]]],
    rules: Sequence[Rule],
    defaults: Sequence[Rule] | None,
    *,
    all_rules: bool = True,
) -> tuple[Assignment, ...]:
    """An optimizer for each (name, shape), from the first rule that matches.

    What no rule matches follows `defaults` and then its shape: Muon takes matrices and stacks of experts, AdamW the
    rest. With `defaults` None there is nothing to follow. Raises ValueError naming the parameters that nothing matches
    and, with `all_rules`, the rules that take nothing.
    """
    assigned = [_assign_one(fqn, tuple(shape), rules, defaults) for fqn, shape in parameters]
    decisive = {assignment.rule for assignment in assigned}
    unused = [rule.match for index, rule in enumerate(rules) if index not in decisive]
    if all_rules and unused:
        raise ValueError(
            f"optimizer.rule: {', '.join(map(repr, unused))} takes no parameter: nothing has such a name, or "
            "rules before it take all that have; correct it, move it up or remove it"
        )
    open_ = [a.fqn for a in assigned if a.optimizer == ""]
    if open_:
        raise ValueError(
            f"optimizer.rule: no rule matches {', '.join(open_[:5])}{' ...' if len(open_) > 5 else ''} "
            f"({len(open_)} parameters); add a rule, or set optimizer.defaults = true"
        )
    return tuple(assigned)


def _assign_one(fqn: str, shape: tuple[int, ...], rules: Sequence[Rule], defaults: Sequence[Rule] | None) -> Assignment:
    for index, rule in enumerate(rules):
        if fnmatch.fnmatchcase(fqn, rule.match):
            return Assignment(fqn, shape, rule.optimizer, rule.reason, index)
    if defaults is None:
        return Assignment(fqn, shape, "", "", None)
    for rule in defaults:
        if fnmatch.fnmatchcase(fqn, rule.match):
            return Assignment(fqn, shape, rule.optimizer, rule.reason, None)
    return Assignment(fqn, shape, *_by_shape(fqn, shape), None)


def _by_shape(fqn: str, shape: tuple[int, ...]) -> tuple[str, str]:
    if len(shape) == 2:
        return "muon", "hidden matrix"
    if len(shape) == 3 and "expert" in fqn:
        return "muon", "stack of expert matrices"
    if len(shape) < 2:
        return "adamw", "vector: norm, bias or scale"
    return "adamw", f"{len(shape)}D and not a stack of experts"
