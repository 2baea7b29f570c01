"""Recipe files as flat entries: dotted key, value and source. Reads bases; writes TOML."""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titan_muon.command import shipped

DATA_SOURCES: Mapping[str, str] = {"data.files": "files", "data.dataset": "hf", "data.dataset_path": "hf"}
"""Value of `data.source` by a key that no other source reads."""


def without_password(text: str) -> str:
    """The text with stars in the place of users and passwords in URLs."""
    return re.sub(r"(?<=://)[^/\s]*:[^/\s]*@", "***@", text)


class RecipeError(ValueError):
    """A user's mistake in a recipe or on the command line. The text is a complete message, without passwords.

    `problem` includes the remedy, and follows the key. `source`: the file or command line with the key.
    """

    def __init__(self, problem: str, *, key: str = "", source: str = "") -> None:
        self.problem, self.key, self.source = problem, key, source
        named = f"{key}{'' if problem.startswith((':', '[')) else ' '}{problem}" if key else problem
        super().__init__(without_password(f"{source}: {named}" if source else named))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would pass the whole text as the problem.
        return partial(RecipeError, self.problem, key=self.key, source=self.source), ()


@dataclass(frozen=True)
class Entry:
    """Unvalidated value of a key. `source`: a file or `command line`."""

    value: object
    source: str


class Words(tuple[str, ...]):
    """Words after a flag, to be read as the type of the key."""


INNER = "expert"
"""Name of a table within a table: `[muon.expert]`."""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The most similar known word."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def read_layers(path: Path, chain: tuple[Path, ...] = ()) -> list[dict[str, Entry]]:
    """The keys of the first base, of each file above it, and of the file, by dotted path.

    `chain`: files with this base. Raises RecipeError for an unreadable file, invalid TOML and a cycle of bases.
    """
    named = " -> ".join(map(str, (*chain, path)))
    if path.resolve() in [link.resolve() for link in chain]:
        raise RecipeError(f"the chain of bases is a cycle: {named}. Take one `base` out of it.", source=str(path))
    document = _parse(path, f" (chain of bases: {named})" if chain else "")
    base = document.pop("base", None)
    if base is None:
        return [with_data_source(_flatten(document, str(path)))]
    if not isinstance(base, str):
        accepted = "the path of one recipe as a string, relative to this file"
        raise RecipeError(f"= {value_text(base)} is not accepted; it takes {accepted}.", key="base", source=str(path))
    first = read_layers(recipe_file(base, path.parent), (*chain, path))
    return [*first, with_data_source(_flatten(document, str(path)))]


def recipe_file(name: str, folder: Path) -> Path:
    """The path of a recipe: below `folder`, or else of the recipe of this package with this name."""
    below, packaged = folder / name, shipped() / "configs" / f"{name.removesuffix('.toml')}.toml"
    return packaged if packaged.exists() and not below.exists() else below


def parse_value(word: str) -> object:
    """A word as a TOML value, or as text."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except (ValueError, RecursionError):
        return word


def _parse(path: Path, context: str) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        recipes = {file.stem: file for folder in (Path("configs"), path.parent) for file in folder.glob("*.toml")}
        name = nearest(path.stem, list(recipes))
        hint = f"Did you mean {recipes[name]}?" if name else "`titan-muon recipes` lists the recipes of this package."
        raise RecipeError(f"no such file{context}. {hint}", source=str(path)) from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}{context}.", source=str(path)) from None
    # Also bytes outside of UTF-8, integers of more than 4,300 digits, and deeply nested values.
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"not valid TOML{context}: {error}.", source=str(path)) from None


def _flatten(document: Mapping[str, object], source: str, table: str = "") -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, value in document.items():
        # A misspelt empty table must be noticed.
        if isinstance(value, dict) and value and (not table or key == INNER):
            entries |= _flatten(value, source, f"{table}{key}.")
        else:
            entries[f"{table}{key}"] = Entry(value, source)
    return entries


def with_data_source(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries of a file or command line, with the `data.source` that its other keys need."""
    given = {
        Entry(source, entries[key].source)
        for key, source in DATA_SOURCES.items()
        if key in entries and entries[key].value
    }
    if "data.source" in entries or len(given) != 1:
        return entries
    return entries | {"data.source": given.pop()}


def value_text(value: object) -> str:
    """A value as inline TOML, with every digit. Dates, invalid in recipes, become text."""
    if isinstance(value, Words) and len(value) == 1:
        return value_text(value[0])
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON has TOML's escapes, except for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(_assignments(value))}}}"
    return value_text(vars(value)) if is_dataclass(value) else str(value)


def _assignments(values: Mapping[str, object]) -> list[str]:
    plain = re.compile(r"[A-Za-z0-9_-]+")
    return [f"{k if plain.fullmatch(k) else value_text(k)} = {value_text(v)}" for k, v in values.items()]


def document_text(values: Mapping[str, object]) -> str:
    """TOML document of values by dotted key. A list of dicts becomes an array of tables."""
    # A key after an array of tables would belong to the last element.
    tables: dict[str, dict[str, object]] = {"": {}}
    arrays: list[str] = []
    for key, value in values.items():
        table, _, leaf = key.rpartition(".")
        tables.setdefault(table, {})
        if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            arrays += ["\n".join([f"[[{key}]]", *_assignments(item)]) for item in value]
        else:
            tables[table][leaf] = value
    blocks = ["\n".join([f"[{table}]"] * bool(table) + _assignments(keys)) for table, keys in tables.items()]
    return "\n\n".join(block for block in blocks + arrays if block) + "\n"
