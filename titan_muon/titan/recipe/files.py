"""Loads a recipe from defaults, bases, a file and the command line; writes a recipe as TOML."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from titan_muon.titan.recipe.constraints import check
from titan_muon.titan.recipe.flags import read_flags, refuse_moved, refuse_unknown
from titan_muon.titan.recipe.schema import build, convert, convert_items, keys, values
from titan_muon.titan.recipe.sections import AdamW, Muon, Recipe, Rule
from titan_muon.titan.recipe.toml import Entry, RecipeError, document_text, read_file, with_data_source

TYPED_OPTIMIZERS: Mapping[str, type] = {"muon": Muon, "adamw": AdamW}


def load(path: str | Path, overrides: Sequence[str] = (), notice: Callable[[str], None] = lambda line: None) -> Recipe:
    """Recipe of a TOML file, its bases and `--section.key value` overrides.

    `notice` gets a line for each adjusted value. Raises RecipeError for an invalid recipe.
    """
    file = Path(path)
    written = read_file(file)
    flags, unknown = read_flags(Recipe, Recipe(), overrides)
    for flag in unknown:
        refuse_moved(flag.removeprefix("--").partition("=")[0], "command line")
    for key, entry in written.items():
        refuse_moved(key, entry.source)
    refuse_unknown(unknown, list(keys(Recipe)))
    flags = with_data_source(flags)
    shorter = _shorter_warmup(written, flags)
    for key, entry in shorter.items():
        notice(f"{key} = {entry.value}: {entry.source}")
    entries = {"name": Entry(file.stem, str(file))} | written | shorter | flags
    sources = {key: entry.source for key, entry in entries.items()}
    recipe = _with_typed_options(build(Recipe, entries), sources.get("optimizer.rule", str(file)))
    # Not before: a base may be valid only together with a file.
    check(recipe, sources, str(file))
    return recipe


def _shorter_warmup(written: Mapping[str, Entry], flags: Mapping[str, Entry]) -> dict[str, Entry]:
    """A proportional warm-up, if the command line sets fewer steps than the file's warm-up and decay."""
    fixed = ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "lr_scheduler.decay_ratio")
    if "training.steps" not in flags or any(key in flags for key in fixed):
        return {}
    known: dict[str, Any] = {**values(Recipe()), **{key: entry.value for key, entry in written.items()}}
    steps: Any = flags["training.steps"].value
    before, warmup, total, decay = (known[key] for key in ("training.steps", *fixed))
    if total is not None or not all(isinstance(count, int) and count > 0 for count in (steps, before, warmup)):
        return {}
    if warmup + round(steps * (decay or 0)) <= steps:
        return {}
    shorter = min(max(1, warmup * steps // before), steps - round(steps * (decay or 0)))
    source = f"shortened from {warmup}, in proportion to training.steps = {steps} instead of {before}"
    return {"lr_scheduler.warmup_steps": Entry(shorter, source)}


def _with_typed_options(recipe: Recipe, source: str) -> Recipe:
    rules = (_typed(rule, f"optimizer.rule[{i}].options", source) for i, rule in enumerate(recipe.optimizer.rule))
    return replace(recipe, optimizer=replace(recipe.optimizer, rule=tuple(rules)))


def _typed(rule: Rule, place: str, source: str) -> Rule:
    # Other packages' optimizers validate options when built.
    if rule.optimizer not in TYPED_OPTIMIZERS:
        return rule
    kinds = get_type_hints(TYPED_OPTIMIZERS[rule.optimizer])
    return replace(rule, options=convert_items(kinds, rule.options, place, source))


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML, equal when loaded. Raises RecipeError for values outside of TOML, such as NaN."""
    kinds, defaults, written = keys(Recipe), values(Recipe()), written_values(recipe)
    for key in kinds:
        if key not in written and defaults[key] is not None:
            raise RecipeError(f"recipe: {key} = None cannot be written: TOML has no null, and absent means a default.")
    for key, value in written.items():
        convert(kinds[key], value, key, "recipe")
    return document_text(written)


def written_values(recipe: Recipe) -> dict[str, object]:
    """Values of a resolved recipe file by dotted key, without absent keys."""
    return {key: _plain(value) for key, value in values(recipe).items() if value is not None}


def keys_of_the_command_line(path: str | Path, recipe: Recipe) -> tuple[str, ...]:
    """Keys with other values in `recipe` than in the file."""
    # Not `load`: the file may be valid only with the command line.
    alone = _with_typed_options(build(Recipe, read_file(Path(path))), str(path))
    written = values(alone)
    return tuple(key for key, value in values(recipe).items() if value != written[key] and key != "name")


def with_source(error: RecipeError, path: str | Path, recipe: Recipe) -> RecipeError:
    """An error about a key, after the file or command line with the key; unchanged for a default."""
    sources = {key: entry.source for key, entry in read_file(Path(path)).items()}
    sources |= dict.fromkeys(keys_of_the_command_line(path, recipe), "command line")
    key = re.match(r"\w+\.\w+", str(error))
    return error if key is None or key[0] not in sources else RecipeError(f"{sources[key[0]]}: {error}")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        inner = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {name: item for name, item in inner.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
