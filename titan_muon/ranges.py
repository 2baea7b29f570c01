"""Ranges of values of options and recipe keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constraint:
    """A condition on a value, with a text for messages."""

    accepted: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class MayChange(Constraint):
    """Marks a key that may change when a run continues. Every value satisfies this constraint.

    `when`: a condition on the values of both recipes by dotted key.
    """

    accepted: str = ""
    holds: Callable[[Any], bool] = lambda value: True
    when: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = lambda mine, theirs: True


MAY_CHANGE = MayChange()


def at_least(low: float, but: int | None = None) -> Constraint:
    """Numbers from `low` on, or `but`."""
    also = "" if but is None else f"{but}, or "
    return Constraint(f"{also}{low} or more", lambda value: low <= value < math.inf or value == but)


def below(low: float, high: float) -> Constraint:
    """The half-open interval."""
    return Constraint(f"a number from {low} to less than {high}", lambda value: low <= value < high)


def one_of(*names: str) -> Constraint:
    """A choice of names."""
    return Constraint(f"one of {', '.join(names)}", lambda value: value in names)


def list_of(inner: Constraint) -> Constraint:
    """A list of elements that satisfy `inner`."""
    return Constraint(f"a list, each element {inner.accepted}", lambda value: all(map(inner.holds, value)))


COUNT = at_least(1)
NOT_NEGATIVE = at_least(0)
POSITIVE = Constraint("more than 0", lambda value: 0 < value < math.inf)
FRACTION = below(0, 1)
SHARE = Constraint("a number from 0 to 1", lambda value: 0 <= value <= 1)
SWITCH = Constraint('a boolean or "auto"', (True, False, "auto").__contains__)
TEXT = Constraint("a string that is not empty", lambda value: bool(value.strip()))


class OptionError(ValueError):
    """An invalid `option` of Muon. `problem` includes the remedy."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}")
        self.option, self.problem = option, problem
