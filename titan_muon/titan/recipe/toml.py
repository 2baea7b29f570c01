"""Recipe files as flat entries: dotted key, value and source. Reads bases; writes TOML."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli

DATA_SOURCES: Mapping[str, str] = {"data.files": "files", "data.dataset": "hf", "data.dataset_path": "hf"}
"""Value of `data.source` by a key that no other source reads."""
MOST_NEIGHBOURS = 8
"""Recipes that the error of a missing file lists."""
DEEPEST = 32
"""Levels of lists and tables; recursion would end in an error without a place."""


class RecipeError(ValueError):
    """A user's mistake in a recipe or on the command line. The text is a complete message."""


@dataclass(frozen=True)
class Entry:
    """Unvalidated value of a key. `source`: a file or `command line`."""

    value: object
    source: str


def nearest(word: str, known: list[str]) -> str | None:
    """The most similar known word."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 rank`, `2 ranks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def read_file(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Entry]:
    """All keys of a recipe and its bases by dotted path; a file overrides its base.

    `chain`: files with this base. Raises RecipeError for an unreadable file, invalid TOML and a cycle of bases.
    """
    named = " -> ".join(map(str, (*chain, path)))
    if path.resolve() in [link.resolve() for link in chain]:
        raise RecipeError(f"{path}: the chain of bases is a cycle: {named}. Take one `base` out of it.")
    document = _parse(path, f" (chain of bases: {named})" if chain else "")
    base = document.pop("base", None)
    if base is None:
        return _flatten(document, str(path))
    if not isinstance(base, str):
        accepted = "the path of one recipe as a string, relative to this file"
        raise RecipeError(f"{path}: base = {value_text(base)} is not accepted; it takes {accepted}.")
    return read_file(path.parent / base, (*chain, path)) | _flatten(document, str(path))


def parse_toml(text: str) -> dict[str, object]:
    """The document of a TOML text. Raises ValueError for invalid TOML, and for deeply nested values."""
    try:
        document = tomli.loads(text)
    except RecursionError:
        document = None
    if document is None or _is_deeper(document, DEEPEST):
        raise ValueError("lists or tables are nested too deeply")
    return document


def _is_deeper(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(item, levels - 1) for item in items)


def _parse(path: Path, context: str) -> dict[str, object]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return parse_toml(text)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file{context}.{_neighbours(path)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}{context}.") from None
    # tomli's errors, bytes outside of UTF-8, and integers of more than 4,300 digits.
    except ValueError as error:
        # tomli names the line, and not the key of a duplicate.
        number = getattr(error, "lineno", 0)
        line = "".join(text.splitlines()[number - 1 : number]).strip()
        quote = f": {line}" if line else ""
        raise RecipeError(f"{path}: not valid TOML{context}: {error}{quote}.") from None


def _neighbours(path: Path) -> str:
    files = [file for folder in (Path("configs"), path.parent) for file in sorted(folder.glob("*.toml"))]
    recipes = {file.stem: str(file) for file in files if file.name != "pyproject.toml"}
    if name := nearest(path.stem, list(recipes)):
        return f" Did you mean {recipes[name]}?"
    shown = list(recipes.values())[-MOST_NEIGHBOURS:]
    return f" Recipes here: {', '.join(shown)}{', ...' if len(recipes) > len(shown) else '.'}" if recipes else ""


def _flatten(document: Mapping[str, object], source: str) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    # A misspelt empty table must be noticed.
    for key, value in document.items():
        if isinstance(value, dict) and value:
            entries |= {f"{key}.{inner}": Entry(item, source) for inner, item in value.items()}
        else:
            entries[key] = Entry(value, source)
    return with_data_source(entries)


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
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON has TOML's escapes, except for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key_text(key)} = {value_text(item)}' for key, item in value.items())}}}"
    return str(value)


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def document_text(values: Mapping[str, object]) -> str:
    """TOML document of values by dotted key. A list of dicts becomes an array of tables."""
    # A key after an array of tables would belong to the last element.
    tables: dict[str, list[str]] = {"": []}
    arrays: list[str] = []
    for key, value in values.items():
        table, _, leaf = key.rpartition(".")
        lines = tables.setdefault(table, [f"[{table}]"])
        if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            arrays += [_table_text(f"[[{key}]]", item) for item in value]
        else:
            lines.append(f"{leaf} = {value_text(value)}")
    blocks = ["\n".join(lines) for lines in tables.values()] + arrays
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table_text(header: str, values: Mapping[str, object]) -> str:
    return "\n".join([header, *(f"{_key_text(key)} = {value_text(value)}" for key, value in values.items())])
