"""Name of a run's folder after the time: keys different from the file and from earlier runs."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.toml import read_file, value_text

LONGEST = 80
"""Longest list of differences, in characters: folder names end at 255 bytes, and TensorBoard's column is narrow."""

LONGEST_VALUE = 24
COMPARED = 20
"""Number of earlier runs to compare with."""

# Keys without influence on the computation: name, folders and the checkpoint to load.
IGNORED = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})


def distinguishing_keys(recipe: Recipe, earlier: Sequence[Path], overrides: Sequence[str]) -> str:
    """`key=value` for keys different from the `earlier` resolved recipes, newest first; empty without differences.

    First the differences from the last run, then `overrides`, the keys of the command line, then differences from older
    runs: a repetition of the last run would otherwise get the name of an older run.
    """
    mine, defaults = written_values(recipe), written_values(Recipe())
    # A recipe of an older version lacks new keys: compare with their defaults.
    changed = [
        [key for key in {**mine, **other} if mine.get(key) != other.get(key, defaults.get(key))]
        for other in _readable(earlier[:COMPARED])
    ]
    keys = [key for part in (*changed[:1], overrides, *changed[1:]) for key in part]
    pairs = [f"{_short(key, mine)}={_value(mine.get(key))}" for key in dict.fromkeys(keys) if key not in IGNORED]
    name = ""
    for number, pair in enumerate(pairs):
        longer = f"{name},{pair}" if name else pair
        if len(longer) > LONGEST:
            return f"{name},+{len(pairs) - number}"
        name = longer
    return name


def _readable(files: Sequence[Path]) -> list[Mapping[str, object]]:
    recipes: list[Mapping[str, object]] = []
    for file in files:
        try:
            recipes.append({key: entry.value for key, entry in read_file(file).items()})
        except RecipeError:
            # A run without a completed start has no recipe.
            continue
    return recipes


def _short(key: str, keys: Mapping[str, object]) -> str:
    """Last word of a key if unique; the table's name for the main key of a table; else the full key."""
    table, _, leaf = key.rpartition(".")
    if any(other.partition(".")[0] == leaf for other in keys):
        return table
    unique = sum(other.rpartition(".")[2] == leaf for other in keys) == 1
    return leaf if unique else key


def _value(value: object) -> str:
    text = value if isinstance(value, str) else "absent" if value is None else value_text(value)
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-")
    # A digest distinguishes long values with the same beginning.
    return plain if len(plain) <= LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:6]
