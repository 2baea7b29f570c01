"""The algorithms of the engine. To delete an algorithm, delete its file and its name below."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, get_type_hints

from .. import registry
from ..engine.step.algorithm import Algorithm, Group
from ..engine.tensors.names import listed
from ..options import MuonOptions, OptionError, check

ALGORITHMS: Mapping[str, tuple[str, str]] = {
    "muon": ("..engine.step.muon", "MuonAlgorithm"),
    "normuon": (".second_moment", "NorMuon"),
    "adamuon": (".second_moment", "AdaMuon"),
    "muoneq": (".muoneq", "MuonEq"),
    "muoneq_columns": (".muoneq", "MuonEqColumns"),
    "muoneq_both": (".muoneq", "MuonEqBoth"),
    "muonh": (".muonh", "MuonH"),
    "soap": (".soap", "Soap"),
}
"""Module and class of each algorithm."""


def _made(name: str, options: MuonOptions) -> Algorithm:
    """Imports the algorithm's file at the first use."""
    module, cls = ALGORITHMS[name]
    algorithm: Algorithm = getattr(import_module(module, __package__), cls)(options)
    return algorithm


for _name in ALGORITHMS:
    registry.algorithms.register(_name, partial(_made, _name))


def algorithm_of(options: MuonOptions, groups: Sequence[Group] = ()) -> Algorithm:
    """The algorithm of the options, or of parameters by their `groups`. A group's key `algorithm` precedes the options.

    Raises OptionError for an unknown name, and for options without a meaning for the algorithm.
    """
    for name in options.algorithm_options:
        if name not in registry.algorithms:
            unknown = registry.UnknownName(name, name, registry.algorithms.names())
            raise OptionError(f"algorithm_options.{name}", f"belongs to no algorithm; {unknown.choices}")
    choices = _choices(options, groups) or [options.algorithm]
    made = {choice: _made_alone(replace(options, algorithm=choice)) for choice in dict.fromkeys(choices)}
    if len(made) == 1:
        return made[choices[0]]
    from .several import ByParameter

    return ByParameter(options, [made[choice] for choice in choices])


def algorithms_in(options: MuonOptions, groups: Sequence[Group]) -> tuple[str, ...]:
    """The names of the algorithms of all groups."""
    return tuple(sorted({name for c in _choices(options, groups) for name in replace(options, algorithm=c).algorithms}))


def choice_of(algorithm: Any) -> Any:
    """A name as it is, and a list of names as a tuple."""
    return tuple(algorithm) if isinstance(algorithm, Sequence) and not isinstance(algorithm, str) else algorithm


def _choices(options: MuonOptions, groups: Sequence[Group]) -> list[str | tuple[str, ...]]:
    return [choice_of(group.get("algorithm", options.algorithm)) for group in groups]


def check_group_algorithm(options: MuonOptions, group: Group) -> None:
    """Raise OptionError for hyperparameters without a meaning for the group's algorithm."""
    try:
        algorithm_of(options, [group]).check_group(group)
    except OptionError as error:
        if "algorithm" not in group:
            raise
        # A remedy is for this group alone.
        raise OptionError(
            error.option, f"{error.problem}, in the group of {listed(group['param_names'], 2)}"
        ) from error


UNSCALED = frozenset({"muon", "muoneq", "muoneq_both", "muoneq_columns", "muonh"})
"""Algorithms without an average of squares."""


def check_used(options: MuonOptions, algorithms: Collection[str]) -> None:
    """Raise OptionError for an option without effect on these algorithms, of all groups: a frozen one may thaw."""
    for name, needed, is_used in (
        ("beta2", "algorithm = 'normuon', 'adamuon' or 'soap'", not UNSCALED.issuperset(algorithms)),
        ("soap_freq", "algorithm = 'soap'", "soap" in algorithms),
        ("momentum_start", "momentum_warmup_steps", options.momentum_warmup_steps > 0),
    ):
        value = getattr(options, name)
        if not is_used and value != getattr(MuonOptions, name):
            raise OptionError(name, f"= {value} has no effect without {needed}; set both, or neither")


def _made_alone(options: MuonOptions) -> Algorithm:
    algorithms = [_named(name, options) for name in options.algorithms]
    if len(algorithms) == 1:
        return algorithms[0]
    from .several import Composed

    return Composed(options, algorithms)


def _named(name: str, options: MuonOptions) -> Algorithm:
    try:
        make = registry.algorithms.get(name)
    except ValueError as error:
        raise OptionError("algorithm", str(error).removeprefix("algorithm ")) from error
    algorithm: Algorithm = make(options)
    algorithm.own = _own_options(algorithm.Options, name, options.algorithm_options.get(name, {}))
    return algorithm


TYPES: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _own_options(table: type | None, algorithm: str, given: Mapping[str, Any]) -> Any:
    """An instance of `table`, or None. Raises OptionError for an unknown key, a wrong type and a value out of range."""
    place = f"algorithm_options.{algorithm}"
    kinds = {} if table is None else get_type_hints(table)
    values = dict(given)
    for key, value in given.items():
        if key not in kinds:
            takes = f"takes {', '.join(kinds)}" if kinds else "has no options of its own"
            raise OptionError(f"{place}.{key}", f"is unknown; leave it out: the algorithm {takes}")
        kind = kinds[key]
        if kind in TYPES and type(value) is not kind and not (kind is float and type(value) is int):
            raise OptionError(f"{place}.{key}", f"= {value!r} is not accepted; it takes {TYPES[kind]}")
        values[key] = float(value) if kind is float else value
    if table is None:
        return None
    check(table, values, f"{place}.")
    try:
        return table(**values)
    except (TypeError, ValueError) as error:
        raise OptionError(place, f"= {values} is not accepted: {error}") from error
