"""Which optimizer takes which parameter, with the reason: rules of the recipe first, then defaults, then the shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Rule


@dataclass(frozen=True)
class Default:
    """Where no rule matches: parameters whose name matches the glob `match` go to `optimizer`, because of `reason`."""

    match: str
    optimizer: str
    reason: str


@dataclass(frozen=True)
class Assignment:
    """The optimizer that takes a parameter. `rule` is the index of the rule that decided, or None for a default."""

    fqn: str
    shape: tuple[int, ...]
    optimizer: str
    reason: str
    rule: int | None


# By name, since no shape tells them apart: these are matrices that Muon is not meant for (Keller Jordan, 2024).
EMBEDDINGS_AND_HEADS = (
    Default("*embed*", "adamw", "embedding: its rows are looked up, not multiplied"),
    Default("*lm_head*", "adamw", "output head"),
    # Without a star before it: hidden layers have projections called output too.
    Default("output.weight", "adamw", "output head"),
)


def default_rules(router: str = "adamw") -> tuple[Default, ...]:
    """What a recipe leaves open, before shapes decide. `router` takes the gates of mixtures of experts."""
    reason = "router of a mixture of experts (optimizer.router)"
    return (*EMBEDDINGS_AND_HEADS, Default("*.router.*weight", router, reason))


def assign(
    parameters: Iterable[tuple[str, Sequence[int]]],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    *,
    all_rules: bool = True,
) -> tuple[Assignment, ...]:
    """An optimizer for each (name, shape), from the first rule that matches.

    What no rule matches follows `defaults` and then its shape: Muon takes matrices and stacks of experts, AdamW the
    rest. With `defaults` None there is nothing to follow. Raises RecipeError naming the parameters that nothing matches
    and, with `all_rules`, the rules that take nothing.
    """
    assigned = tuple(_assign_one(fqn, tuple(shape), rules, defaults or ()) for fqn, shape in parameters)
    if all_rules:
        _refuse_unused(rules, assigned)
    undecided = [a.fqn for a in assigned if a.rule is None] if defaults is None else []
    if undecided:
        raise RecipeError(
            f"optimizer.rule: no rule matches {', '.join(undecided[:5])}{' ...' if len(undecided) > 5 else ''} "
            f"({len(undecided)} parameters); add a rule, or set optimizer.defaults = true"
        )
    return assigned


def _refuse_unused(rules: Sequence[Rule], assigned: Sequence[Assignment]) -> None:
    # A misspelt glob would otherwise train its parameters under the defaults, and nothing would tell.
    used = {assignment.rule for assignment in assigned}
    unused = [rule.match for index, rule in enumerate(rules) if index not in used]
    if unused:
        raise RecipeError(
            f"optimizer.rule: {', '.join(map(repr, unused))} takes no parameter: nothing has such a name, or "
            "rules before it take all that have; correct it, move it up or remove it"
        )


def _assign_one(fqn: str, shape: tuple[int, ...], rules: Sequence[Rule], defaults: Sequence[Default]) -> Assignment:
    # fnmatchcase, not fnmatch: that one folds case on some systems, and the same recipe would train otherwise there.
    for index, rule in enumerate(rules):
        if fnmatchcase(fqn, rule.match):
            return Assignment(fqn, shape, rule.optimizer, f"optimizer.rule[{index}] {rule.match!r}", index)
    for default in defaults:
        if fnmatchcase(fqn, default.match):
            return Assignment(fqn, shape, default.optimizer, default.reason, None)
    return Assignment(fqn, shape, *_by_shape(fqn, shape), None)


def _by_shape(fqn: str, shape: tuple[int, ...]) -> tuple[str, str]:
    if len(shape) == 2:
        return "muon", "hidden matrix"
    # A 3D tensor alone is no stack: the weight of a 1D convolution is one too, and its slices are no matrices.
    if len(shape) == 3 and "expert" in fqn:
        return "muon", "stack of expert matrices"
    if len(shape) < 2:
        return "adamw", "vector: norm, bias or scale"
    return "adamw", f"{len(shape)}D and not a stack of experts"
