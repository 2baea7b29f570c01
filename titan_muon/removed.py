"""What earlier versions had: what it did, and what to do instead. Keys are those of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Removed(NamedTuple):
    """A removed option. `default`: its value without effect. `problem`: follows the option's name."""

    default: object
    problem: str


OPTIONS: Mapping[str, Removed] = MappingProxyType({})

VALUES: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        (
            "optimizer",
            "adamh",
        ): "was removed, because weights were zero in a step; use 'adamw' for these parameters, and "
        "algorithm = 'muonh' for matrices",
        ("muon.ns_coefficients", "aol"): "was removed: it scaled rows and no run gained by it; set another set, as "
        "'polar_express'",
        (
            "muon.expert.on_bad_gradient",
            "skip",
        ): "was removed, because undoing parts of a step on the device took up to "
        "twice its time; set 'skip_step', which skips whole steps on all ranks, or 'skip_missing'",
        ("muon.expert.on_bad_gradient", "skip_nonfinite"): "was removed, because undoing parts of a step on the device "
        "took up to twice its time; set 'skip_step', which skips whole steps on all ranks",
        ("muon.expert.ns_kernel", "quack"): "was removed: no run measured it; set 'auto' or 'triton'",
    }
)
"""Removed values of options, each with a problem."""


def removed_option(name: str) -> str | None:
    """The problem of a removed option of Muon. None for another name."""
    found = OPTIONS.get(f"muon.expert.{name}") or OPTIONS.get(f"muon.{name}")
    return None if found is None else found.problem


def removed_value(name: str, value: object) -> str | None:
    """The problem of a removed value of an option of Muon. None for another value."""
    if not isinstance(value, str):
        return None
    problem = VALUES.get((f"muon.{name}", value)) or VALUES.get((f"muon.expert.{name}", value))
    return None if problem is None else f"= {value!r} {problem}"
