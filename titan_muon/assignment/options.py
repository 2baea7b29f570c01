"""Options of Hybrid. Imports only the standard library, as `titan_muon/options.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..options import EXPERT, KEYWORDS, OTHER_NAMES, Expert, written_option
from ..ranges import TEXT, OptionError
from ..removed import refuse_removed


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[optimizer.rule]]`, or one rule of `Hybrid`: parameters with a matching name go to an optimizer."""

    match: Annotated[str, TEXT]
    """Glob on fully qualified names; `*` also crosses dots."""

    optimizer: Annotated[str, TEXT]
    """Name of a registered optimizer."""

    options: dict[str, object] = field(default_factory=dict)
    """Hyperparameters for these parameters that differ from the optimizer's own table."""


def refuse_hybrid_keywords(unknown: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword of Hybrid, with the place that takes it."""
    for name in unknown:
        refuse_removed([name])
        if (match := OTHER_NAMES.get(name, name)) in EXPERT:
            raise TypeError(f"Hybrid has no keyword {name}; write {written_option(match)}, with titan_muon.Expert")
        table = "muon" if name in KEYWORDS else "adamw"
        raise TypeError(f"Hybrid has no keyword {name}; give options of one optimizer as {table}={{{name!r}: ...}}")


def with_expert(muon: Mapping[str, Any], expert: Expert) -> dict[str, Any]:
    """Muon's keywords in a Hybrid. Raises OptionError for an `expert` among them."""
    if "expert" in muon:
        raise OptionError("muon['expert']", "belongs beside muon; pass expert=Expert(...) to Hybrid")
    return {**muon, "expert": expert}
