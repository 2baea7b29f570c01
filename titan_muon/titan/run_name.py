"""What a run's folder says of it besides the time: the keys that tell it from its file and from earlier runs."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.toml import read_file, value_text

LONGEST = 80
"""Characters of what differs: names of folders end at 255 bytes, and TensorBoard shows them in a narrow column."""

LONGEST_VALUE = 24
COMPARED = 20
"""Earlier runs that are read."""

# Where a run is kept and from where it goes on are no part of what it computes.
UNSAID = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})


def what_differs(recipe: Recipe, earlier: Sequence[Path], given: Sequence[str]) -> str:
    """`key=value` for what tells a recipe from `earlier` resolved recipes, the newest first; empty if nothing does.

    First comes what differs from the run before, then `given`, the keys that the command line changed, then what
    differs from older runs: a run that repeats the one before it would else be named like one of those.
    """
    mine, defaults = written_values(recipe), written_values(Recipe())
    changed = [_differing(mine, other, defaults) for other in _readable(earlier[:COMPARED])]
    keys = [key for part in (*changed[:1], given, *changed[1:]) for key in part]
    said = [f"{_short(key, mine)}={_value(mine.get(key))}" for key in dict.fromkeys(keys) if key not in UNSAID]
    return _joined(said)


def _readable(files: Sequence[Path]) -> list[Mapping[str, object]]:
    found: list[Mapping[str, object]] = []
    for file in files:
        try:
            found.append({key: entry.value for key, entry in read_file(file).items()})
        except RecipeError:
            # A run that ended before its first step has written no recipe.
            continue
    return found


def _differing(mine: Mapping[str, object], other: Mapping[str, object], defaults: Mapping[str, object]) -> list[str]:
    # An older version of this program has written no value for a key that it did not have: then it had the default.
    return [key for key in {**mine, **other} if mine.get(key) != other.get(key, defaults.get(key))]


def _short(key: str, keys: Mapping[str, object]) -> str:
    """The last word of a key where it is the only such key; the table for the key that the table is all about."""
    table, _, leaf = key.rpartition(".")
    if any(other.partition(".")[0] == leaf for other in keys):
        return table
    alone = sum(other.rpartition(".")[2] == leaf for other in keys) == 1
    return leaf if alone else key


def _value(value: object) -> str:
    text = value if isinstance(value, str) else "absent" if value is None else value_text(value)
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-")
    # A digest still tells two long values apart, where their beginnings may be the same.
    return plain if len(plain) <= LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:6]


def _joined(said: Sequence[str]) -> str:
    name = ""
    for number, part in enumerate(said):
        longer = f"{name},{part}" if name else part
        if len(longer) > LONGEST:
            return f"{name},+{len(said) - number}"
        name = longer
    return name
