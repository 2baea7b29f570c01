"""Strict schemas from dataclasses: entries with dotted keys become a frozen instance, or an error.

`X | None` is an absent key. The only conversion of TOML's values is from int to float.
"""

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from titan_muon import removed
from titan_muon.options import OTHER_NAMES
from titan_muon.ranges import MAY_CHANGE, MayChange
from titan_muon.trainer.recipe.toml import Entry, RecipeError, Words, nearest, parse_value, value_text

T = TypeVar("T")
NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
MEANT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("lr", "learning_rate"), "muon.lr"),
        "beta1": "muon.momentum",
        "wd": "muon.weight_decay",
        "batch_size": "training.global_batch_size",
        "max_steps": "training.steps",
        "seed": "debug.seed",
        "tp": "parallelism.tensor_parallel_degree",
        "ep": "parallelism.expert_parallel_degree",
        "resume": "checkpoint.load",
        "interval": "checkpoint.freq",
        "muon.rule": "muon.algorithm",
    }
)
"""Keys by names that users try: a whole key, or its last part. Letters would suggest other keys."""
# In this order, so that 1 stays an int.
FREE_VALUE = bool | int | float | str


def keys(schema: Any, *, ranges: bool = False) -> dict[str, Any]:
    """Types of all keys by dotted path; with `ranges`, annotated with their constraints."""
    return _flat(get_type_hints(schema, include_extras=ranges), partial(keys, ranges=ranges))


def values(instance: Any) -> dict[str, Any]:
    """Values of all keys by dotted path."""
    return _flat({field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}, values)


@cache
def _marks(schema: Any) -> Mapping[str, MayChange]:
    marks: dict[str, MayChange] = {}
    for name, kind in get_type_hints(schema, include_extras=True).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            below = dict.fromkeys(keys(kind), MAY_CHANGE) if hasattr(kind, "may_change") else _marks(kind)
            marks |= {f"{name}.{key}": mark for key, mark in below.items()}
        for mark in get_args(kind):
            if isinstance(mark, MayChange):
                marks[name] = mark
    return marks


def may_change(schema: Any, key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a key may change between two recipes of a run. `mine`, `theirs`: values of all keys by dotted path."""
    return key in _marks(schema) and _marks(schema)[key].when(mine, theirs)


def _flat(items: Mapping[str, Any], inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Items by name; those of a table by dotted path."""
    flat: dict[str, Any] = {}
    for name, item in items.items():
        is_table = dataclasses.is_dataclass(item)
        flat |= {f"{name}.{leaf}": part for leaf, part in inner(item).items()} if is_table else {name: item}
    return flat


def build(schema: type[T], entries: Mapping[str, Entry]) -> T:
    """Instance of `schema` from entries by dotted key.

    Raises RecipeError for an unknown key, a wrong type, and a value out of range.
    """
    kinds, given = keys(schema, ranges=True), dict[str, Any]()
    for key, entry in entries.items():
        if key in kinds:
            given[key] = convert(kinds[key], entry.value, key, entry.source)
        elif not any(known.startswith(f"{key}.") for known in kinds):
            raise unknown(entry.source, key, entry.value, list(kinds))
        elif entry.value != {}:
            raise refuse(entry.source, key, entry.value, f"a table: [{key}]")
    return _instance(schema, given)


def _instance(schema: type[T], given: Mapping[str, Any]) -> T:
    """Instance of `schema` from values by dotted key."""
    arguments: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        inner = {key.removeprefix(f"{name}."): value for key, value in given.items() if key.startswith(f"{name}.")}
        if name in given or inner:
            arguments[name] = _instance(kind, inner) if inner else given[name]
    return schema(**arguments)


def convert(kind: Any, value: Any, key: str, source: str) -> Any:
    """`value` as the type `kind`; lists become tuples. Raises RecipeError with the innermost wrong key."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        converted, constraint = convert(args[0], value, key, source), args[1]
        if not constraint.holds(converted):
            raise refuse(source, key, converted, constraint.accepted)
        return converted
    if origin in (Union, types.UnionType):
        return _convert_union(kind, value, key, source)
    if isinstance(value, Words):
        value = _read(kind, value, key, source)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _convert_table(kind, value, key, source)
    if origin is tuple and isinstance(value, list | tuple) and (args[-1] is Ellipsis or len(value) == len(args)):
        pairs = enumerate(zip(args[:1] * len(value) if args[-1] is Ellipsis else args, value, strict=True))
        return tuple(convert(element, item, f"{key}[{index}]", source) for index, (element, item) in pairs)
    if origin is dict and isinstance(value, dict):
        free = partial(convert, args[1]) if get_origin(args[1]) is dict else _convert_free
        return {name: free(item, f"{key}.{name}", source) for name, item in value.items()}
    if origin is Literal and isinstance(value, str) and value in args:
        return value
    # TOML's integers are unbounded.
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    # Not isinstance: True is an int, and `steps = true` would train one step.
    if kind in (bool, int, str) and type(value) is kind:
        return value
    accepted = describe(kind)
    if origin is tuple and dataclasses.is_dataclass(args[0]) and isinstance(value, dict):
        accepted = f"a list of tables: write [[{key}]] for each"
    raise refuse(source, key, value, accepted, choices=args if origin is Literal else ())


def _read(kind: Any, words: Words, key: str, source: str) -> object:
    """TOML value of the words after a flag; text if the type will refuse the words."""
    if get_origin(kind) is tuple:
        items = parse_value(words[0]) if len(words) == 1 else None
        # A list in a single word is the whole value, or the only element of a list of lists.
        nested = get_origin(get_args(kind)[0]) is tuple
        if isinstance(items, list) and (not nested or (items and all(isinstance(item, list) for item in items))):
            return items
        # `--compare KEY=A,B` has its own commas.
        if len(words) == 1 and not nested and not re.search(r"[\[{]|^[\w.+]+=", words[0]):
            words = Words(words[0].split(","))
        return [Words((word,)) for word in words]
    if kind is bool and not words:
        return True
    if len(words) != 1:
        problem = f"{len(words)} values ({' '.join(words)})" if words else "no value"
        bare = next((word.lstrip("-") for word in words[1:] if re.match(r"-?\w+\.\w+", word)), None)
        hint = f" Write --{bare} for another key." if bare else ""
        raise RecipeError(f"is given {problem}; it takes {describe(kind)}.{hint}", key=key, source=source)
    (word,) = words
    if kind is str or get_origin(kind) is Literal:
        return word
    if kind is bool:
        return BOOLEANS.get(word, word)
    # int first: 3.0 is invalid for an integer key.
    for number in (int, float) if kind in (int, float) else ():
        with suppress(ValueError):
            return number(word)
    return word if kind in (int, float) else parse_value(word)


def convert_items(tables: Sequence[type], items: Mapping[str, object], place: str, source: str) -> dict[str, Any]:
    """The items of the table at `place`, as the fields of `tables`. Raises RecipeError as `build`."""
    kinds = {name: kind for table in tables for name, kind in get_type_hints(table, include_extras=True).items()}
    # A suggestion for a misspelt key helps more than a type error.
    for name, item in items.items():
        if name not in kinds:
            raise unknown(source, f"{place}.{name}", item, [f"{place}.{known}" for known in kinds])
    return {name: convert(kinds[name], item, f"{place}.{name}", source) for name, item in items.items()}


def _convert_table(kind: Any, value: dict[str, Any], key: str, source: str) -> Any:
    converted = convert_items((kind,), value, key, source)
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in value:
            raise refuse(source, key, value, f"a table that has `{field.name}`")
    return kind(**converted)


def _convert_union(union: Any, value: Any, key: str, source: str) -> Any:
    kinds = [kind for kind in get_args(union) if kind is not type(None)]
    if isinstance(value, Words) and value and (value[0].startswith("[") or "," in value[0]):
        # Every word is a string, but no name starts like a list or has a comma.
        kinds.sort(key=lambda kind: get_origin(kind) is not tuple)
    for kind in kinds:
        try:
            return convert(kind, value, key, source)
        except RecipeError:
            # This error may name an inner element. With several types it would mislead.
            if len(kinds) == 1:
                raise
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    raise refuse(source, key, value, describe(union), choices=choices)


def _convert_free(value: Any, key: str, source: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_convert_free(item, f"{key}[{index}]", source) for index, item in enumerate(value))
    if isinstance(value, dict) and key.endswith(".expert"):
        problem = "is of all matrices, and not of a rule; write its keys under [muon.expert]"
        raise RecipeError(f"= {_shown(value)} {problem}.", key=key, source=source)
    return convert(FREE_VALUE, value, key, source)


def describe(kind: Any) -> str:
    """Accepted values of a type, as text."""
    origin, args = get_origin(kind), [arg for arg in get_args(kind) if arg is not type(None)]
    if origin is Annotated:
        return describe(args[0])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(value_text, args))
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each element {describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(map(describe, args))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, args))
    if dataclasses.is_dataclass(kind):
        names = list(get_type_hints(kind))
        return f"a table with the keys {', '.join(names)}, as in {{{names[0]} = ...}}"
    return NAMES.get(kind, "a table")


def refuse(source: str, key: str, value: object, accepted: str, choices: Sequence[str] = ()) -> RecipeError:
    """Error for a refused value; None is an absent key."""
    word = value[0] if isinstance(value, Words) and value else value
    choice = nearest(str(word), choices) if word else None
    hint = f" Did you mean {value_text(choice)}?" if choice else ""
    if isinstance(word, str) and (gone := removed.VALUES.get((key, word))):
        return RecipeError(f"= {_shown(value)} {gone}.", key=key, source=source)
    problem = "is missing" if value is None else f"= {_shown(value)} is not accepted"
    return RecipeError(f"{problem}; it takes {accepted}.{hint}", key=key, source=source)


def without_removed(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of a recipe that a run wrote, without removed keys whose value had no effect."""
    gone = removed.OPTIONS
    return {key: entry for key, entry in entries.items() if key not in gone or entry.value != gone[key].default}


def unknown(source: str, key: str, value: object, known: Sequence[str]) -> RecipeError:
    """Error for an unknown key, with a suggestion."""
    table, _, _ = key.rpartition(".")
    if gone := removed.OPTIONS.get(key):
        return RecipeError(f"{gone.problem}.", key=key, source=source)
    if key in removed.FLAGS and source == "command line":
        return RecipeError(f"--{key.replace('_', '-')} {removed.FLAGS[key]}.", source=source)
    tables = list(dict.fromkeys(name.partition(".")[0] for name in known if "." in name))
    leaves = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == table]
    suggestion = _nearest_key(key, known, leaves, tables)
    hint = f" Did you mean {suggestion}?" if suggestion else ""
    setting = key if value == () else f"{key} = {_shown(value)}"
    if table and leaves:
        return RecipeError(f"unknown key {setting}.{hint} {table} takes {', '.join(leaves)}.", source=source)
    noun = f"table [{table or key}]" if table or isinstance(value, dict) else "key"
    return RecipeError(f"unknown {noun}: {setting}.{hint} The tables are {', '.join(tables)}.", source=source)


def _nearest_key(key: str, known: Sequence[str], leaves: Sequence[str], tables: Sequence[str]) -> str | None:
    table, _, leaf = key.rpartition(".")
    meant = MEANT.get(key, MEANT.get(leaf))
    if meant in known and (leaves or not table) and OTHER_NAMES.get(leaf) not in leaves:
        return meant
    name = OTHER_NAMES.get(leaf, leaf)
    if suggestion := nearest(name, leaves):
        return f"{table}.{suggestion}" if table else suggestion
    below = [path for path in known if table and path.startswith(f"{table}.") and path.rpartition(".")[0] != table]
    inner = {path.rpartition(".")[2]: path for path in below}
    inner |= {path.split(".")[-2]: f"[{path.rpartition('.')[0]}]" for path in below}
    if suggestion := nearest(name, [*inner]):
        return inner[suggestion]
    if suggestion := nearest(table or key, tables if not (table and leaves) else []):
        return f"[{suggestion}]"
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    return nearest(key, elsewhere) or next(iter(elsewhere), None) or nearest(key, known)


def _shown(value: object) -> str:
    text = value_text(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
