"""Which parameters are owned, by rules on their names: the first that matches decides, and then what was chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from ..options import OptionError, Owner, PlacementRule, check


def placed(names: Iterable[str], chosen: Collection[str], rules: Sequence[PlacementRule]) -> dict[str, Owner]:
    """How the owners of each parameter that is owned are found; `chosen` are owned where no rule matches."""
    found: dict[str, Owner] = {}
    for name in names:
        index = _first(name, rules)
        if index is None and name in chosen:
            found[name] = "balanced"
        elif index is not None and rules[index].placement == "owned":
            found[name] = rules[index].owner
    return found


def check_rules(names: Iterable[str], rules: Sequence[PlacementRule]) -> None:
    """Raise ValueError for a rule that no parameter follows, and for one that says what no rule can."""
    # A misspelt glob would otherwise leave its parameters where they were, and nothing would tell.
    used = {_first(name, rules) for name in names}
    for index, rule in enumerate(rules):
        place = f"placement.rule[{index}]"
        try:
            check(PlacementRule, vars(rule))
        except OptionError as error:
            raise ValueError(f"{place}.{error}") from error
        if index not in used:
            raise ValueError(
                f"{place}.match = {rule.match!r} matches no parameter: nothing has such a name, or rules before it "
                "match all that have; correct it, move it up or remove it"
            )
        if rule.placement == "shard0" and rule.owner != "balanced":
            raise ValueError(f"{place}.owner = {rule.owner!r}: what is sharded has no owner; set placement = 'owned'")


def _first(name: str, rules: Sequence[PlacementRule]) -> int | None:
    # fnmatchcase, not fnmatch: that one folds case on some systems, and the same rules would place otherwise there.
    return next((index for index, rule in enumerate(rules) if fnmatchcase(name, rule.match)), None)
