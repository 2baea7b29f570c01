"""A dataclass as command-line flags. tyro parses flags and prints the help; schema.py validates.

Every flag takes any number of words, so that files and flags share error messages.
"""

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import tyro

from titan_muon.titan.recipe.schema import describe, keys, unknown, values
from titan_muon.titan.recipe.toml import Entry, RecipeError, parse_toml, value_text

MOVED: Mapping[str, str] = {}
"""The new key by the former key."""

SOURCE = "command line"
BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


class ParsedFlags(tuple[str, ...]):
    """Words after a flag. The type marks keys that override the file, even with the default value."""


def read_flags(schema: type, default: Any, arguments: Sequence[str]) -> tuple[dict[str, Entry], list[str]]:
    """Entries by key of `schema`, and the unknown arguments.

    Raises RecipeError for a wrong number of words after a flag.
    """
    # tyro takes a third of a second even without arguments.
    if not arguments:
        return {}, []
    parsed, unknown_flags = _tyro(schema, default, arguments, return_unknown_args=True, add_help=False)
    kinds, given = keys(schema), {k: v for k, v in values(parsed).items() if isinstance(v, ParsedFlags)}
    return {key: Entry(_value(kinds[key], words, key), SOURCE) for key, words in given.items()}, unknown_flags


def refuse_moved(key: str, source: str) -> None:
    """Raise RecipeError for a renamed key."""
    if key in MOVED:
        table, _, leaf = MOVED[key].partition(".")
        raise RecipeError(f"{source}: {key} is {MOVED[key]} now; write `{leaf}` under [{table}].")


def refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raise RecipeError for the first of `arguments`, with a suggestion from `known`."""
    if not arguments:
        return
    flag, _, text = arguments[0].partition("=")
    if not flag.startswith("--"):
        raise RecipeError(f"{SOURCE}: {arguments[0]!r} belongs to no flag; overrides are written --section.key value.")
    value = text or next((word for word in arguments[1:2] if not word.startswith("--")), None)
    raise unknown(SOURCE, flag[2:].replace("-", "_"), value, list(known))


def print_help(schema: type, default: Any, description: str | None, prog: str) -> NoReturn:
    """Print the flags of `schema` with docstrings and the values of `default`, and exit."""
    _tyro(schema, default, ["--help"], description=description, prog=prog)
    raise AssertionError("tyro exits once it has printed the help")


def print_completion(schema: type, default: Any, shell: str, prog: str) -> NoReturn:
    """Print a completion script for the flags of `schema`, and exit."""
    _tyro(schema, default, ["--tyro-print-completion", shell], prog=prog)
    raise AssertionError("tyro exits once it has printed the script")


def _tyro(schema: type, default: Any, arguments: Sequence[str], **options: Any) -> Any:
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_words_of)
    return tyro.cli(
        schema,
        args=arguments,
        default=default,
        use_underscores=True,
        # A boolean takes a value, as in a recipe file.
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
        **options,
    )


def _words_of(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if dataclasses.is_dataclass(info.type):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=_metavar(info.type),
        instance_from_str=ParsedFlags,
        is_instance=lambda value: isinstance(value, ParsedFlags),
        str_from_instance=lambda value: [*map(_help_text, value if isinstance(value, tuple) else (value,))],
    )


def _metavar(kind: Any) -> str:
    origin, args = get_origin(kind), [arg for arg in get_args(kind) if arg is not type(None)]
    if origin is Annotated:
        return _metavar(args[0])
    if kind is bool:
        return "[{true,false}]"
    if origin is Literal:
        return "{" + ",".join(args) + "}"
    if origin is tuple:
        element = "LIST" if get_origin(args[0]) is tuple else _metavar(args[0])
        return f"[{element} ...]" if args[-1] is Ellipsis else " ".join(map(_metavar, args))
    if origin in (Union, types.UnionType):
        return "|".join(map(_metavar, args))
    return "TABLE" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", "VALUE").upper()


def _help_text(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return value_text(values(value))
    return "absent" if value is None else value if isinstance(value, str) else value_text(value)


def _value(kind: Any, words: tuple[str, ...], key: str) -> object:
    """TOML value of the words after a flag; text if the type will refuse the words."""
    members = [arg for arg in get_args(kind) if arg is not type(None)]
    if get_origin(kind) in (Union, types.UnionType):
        # A single word may be a name or a list of one element in brackets.
        lists = [member for member in members if get_origin(member) is tuple]
        several = lists and (len(words) != 1 or words[0].startswith("["))
        return _value(lists[0] if several else members[0], words, key)
    if get_origin(kind) is tuple:
        items = _toml(words[0]) if len(words) == 1 else None
        # A list in a single word is the whole value, or the only element of a list of lists.
        nested = get_origin(members[0]) is tuple
        if isinstance(items, list) and (not nested or (items and all(isinstance(item, list) for item in items))):
            return items
        return [_word(members[0], word) for word in words]
    if kind is bool and not words:
        return True
    if len(words) == 1:
        return _word(kind, words[0])
    problem = "no value" if not words else f"{len(words)} values ({' '.join(words)})"
    bare = next((word for word in words if re.match(r"\w+\.\w+=", word)), None)
    hint = f" Write --{bare} for another key." if bare else ""
    raise RecipeError(f"{SOURCE}: {key} is given {problem}; it takes {describe(kind)}.{hint}")


def _word(kind: Any, word: str) -> object:
    if kind is str or get_origin(kind) is Literal:
        return word
    if kind is bool:
        return BOOLEANS.get(word, word)
    if kind not in (int, float):
        return _toml(word)
    # int first: 3.0 is invalid for an integer key.
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word


def _toml(word: str) -> object:
    try:
        return parse_toml(f"value = {word}")["value"]
    except ValueError:
        return word
