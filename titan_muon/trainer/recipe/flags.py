"""Flags of the command line, and their help by tyro."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import tyro

from titan_muon.trainer.recipe.schema import build, describe, keys
from titan_muon.trainer.recipe.toml import Entry, RecipeError, Words, value_text

SOURCE = "command line"
HELP = {"-h", "--help"}
T = TypeVar("T")


def read_flags(arguments: Iterable[str]) -> dict[str, Entry]:
    """Words by flag, with underscores in place of hyphens. The last of equal flags counts.

    Raises RecipeError for a word before any flag.
    """
    flags: dict[str, list[str]] = {}
    words: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, text = argument.removeprefix("--").partition("=")
            words = flags["imports" if flag == "import" else flag.replace("-", "_")] = [text] if equals else []
        elif words is None:
            hint = f" Name a recipe by --config {argument}." if argument.endswith(".toml") else ""
            problem = f"{argument!r} belongs to no flag; overrides are written --section.key value."
            raise RecipeError(f"{problem}{hint}", source=SOURCE)
        else:
            words.append(argument)
    return {flag: Entry(Words(words), SOURCE) for flag, words in flags.items()}


def read_options(schema: type[T], arguments: Iterable[str]) -> tuple[T, list[str]]:
    """The options of `schema`, and the other flags. Raises RecipeError as `read_flags` and `build`."""
    flags = read_flags(arguments)
    own = {name: entry for name, entry in flags.items() if name in keys(schema)}
    others = {name: entry.value for name, entry in flags.items() if name not in own}
    return build(schema, own), [word for name, words in others.items() for word in _written(name, words)]


def _written(name: str, words: Any) -> list[str]:
    # A single word may begin with hyphens.
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]


def print_flags(schema: type, default: Any, prog: str, description: str | None = None) -> NoReturn:
    """Print the flags of `schema` with docstrings and the values of `default`, and exit."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_flag)
    tyro.cli(
        schema,
        args=["--help"],
        prog=prog,
        description=description,
        default=default,
        use_underscores=True,
        # A boolean takes a value, as in a recipe file.
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
    )
    raise AssertionError("tyro exits once it has printed")


def _flag(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if dataclasses.is_dataclass(info.type):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=describe(info.type),
        instance_from_str=tuple,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [*map(_help_text, value if isinstance(value, tuple) else (value,))],
    )


def _help_text(value: Any) -> str:
    return "absent" if value is None else value if isinstance(value, str) else value_text(value)
