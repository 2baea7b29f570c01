"""Loads a recipe from defaults, bases, a file and the command line; writes a recipe as TOML."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from titan_muon.command import shipped
from titan_muon.options import Expert
from titan_muon.trainer.recipe.constraints import check
from titan_muon.trainer.recipe.flags import read_flags
from titan_muon.trainer.recipe.schema import build, convert, convert_items, keys, values, without_removed
from titan_muon.trainer.recipe.sections import AdamW, Muon, Recipe
from titan_muon.trainer.recipe.toml import Entry, RecipeError, document_text, read_layers, with_data_source

TYPED_OPTIMIZERS: Mapping[str, Sequence[type]] = {"muon": (Muon, Expert), "adamw": (AdamW,)}


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    notice: Callable[[str], None] = lambda line: None,
    *,
    saved: bool = False,
) -> Recipe:
    """Recipe of a TOML file, its bases and `--section.key value` overrides.

    `notice` gets a line for each adjusted value. `saved`: a run wrote the file, perhaps of 0.2.0. Raises
    RecipeError for an invalid recipe.
    """
    return load_with_sources(path, overrides, notice, saved=saved)[0]


def load_with_sources(
    path: str | Path, overrides: Sequence[str], notice: Callable[[str], None], *, saved: bool = False
) -> tuple[Recipe, Mapping[str, str]]:
    """As `load`, and the file or command line that decides each given key."""
    file = Path(path)
    layers = [*read_layers(file), with_data_source(read_flags(overrides))]
    entries = _merged([without_removed(layer) for layer in layers] if saved else layers)
    sources = {key: entry.source for key, entry in entries.items()}
    recipe = _build({"name": Entry(file.stem, str(file))} | entries, str(file))
    recipe = _with_shorter_warmup(recipe, layers, notice)
    # Not before: a base may be valid only together with a file.
    check(recipe, sources, str(file))
    return recipe, sources


def with_source(error: RecipeError, sources: Mapping[str, str]) -> RecipeError:
    """An error about a key, after the file or command line with the key; unchanged for a default."""
    # An item of a list has the source of the list.
    source = sources.get(error.key.partition("[")[0])
    return error if source is None or error.source else RecipeError(error.problem, key=error.key, source=source)


def _build(entries: Mapping[str, Entry], file: str) -> Recipe:
    """The recipe of `entries`. Options of its rules have the types of the optimizer's table."""
    recipe = build(Recipe, entries)
    source = entries["optimizer.rule"].source if "optimizer.rule" in entries else file
    rules = list(recipe.optimizer.rule)
    for i, rule in enumerate(rules):
        # Other packages' optimizers validate options when built.
        if (tables := TYPED_OPTIMIZERS.get(rule.optimizer)) is not None:
            typed = convert_items(tables, rule.options, f"optimizer.rule[{i}].options", source)
            rules[i] = replace(rule, options=typed)
    return replace(recipe, optimizer=replace(recipe.optimizer, rule=tuple(rules)))


def _merged(layers: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    return {key: entry for layer in layers for key, entry in layer.items()}


def _with_shorter_warmup(
    recipe: Recipe, layers: Sequence[Mapping[str, Entry]], notice: Callable[[str], None]
) -> Recipe:
    """A proportional warm-up, if a file or the command line sets fewer steps than the warm-up and decay of its base.

    `layers`: keys of bases, file and command line.
    """
    schedule, steps = recipe.lr_scheduler, recipe.training.steps
    fixed = ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "lr_scheduler.decay_ratio")
    warmup, decay = schedule.warmup_steps, round(steps * (schedule.decay_ratio or 0))
    last = max((number for number, layer in enumerate(layers) if "training.steps" in layer), default=0)
    if any(key in layer for layer in layers[last:] for key in fixed) or schedule.total_steps is not None:
        return recipe
    if warmup == 0 or warmup + decay <= steps:
        return recipe
    before = _merged(layers[:last]).get("training.steps", Entry(type(recipe.training).steps, "")).value
    # Nothing has checked a value that a later layer replaces.
    if type(before) is not int or before < 1:
        return recipe
    shorter = min(max(1, warmup * steps // before), steps - decay)
    because = f"shortened from {warmup}, in proportion to training.steps = {steps} instead of {before}"
    notice(f"lr_scheduler.warmup_steps = {shorter}: {because}")
    return replace(recipe, lr_scheduler=replace(schedule, warmup_steps=shorter))


def import_models() -> None:
    """Import this package's `models`, which register the families: beside the package, or within it in a wheel."""
    if "models" not in sys.modules:
        folder = shipped() / "models"
        spec = spec_from_file_location("models", folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None, "the package has its models"
        assert spec.loader is not None, "a file has a loader"
        sys.modules["models"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["models"])


def import_modules(recipe: Recipe) -> None:
    """Import `models` and the modules of `imports`, also from the working directory.

    Raises RecipeError for a missing module.
    """
    import_models()
    for name in recipe.imports:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            where = f"install it, or start in the folder of {name.partition('.')[0]}.py (now {os.getcwd()})"
            raise RecipeError(f": there is no module {name!r}; {where}", key="imports") from error


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML, equal when loaded. Raises RecipeError for values outside of TOML, such as NaN."""
    kinds, written = keys(Recipe), written_values(recipe)
    for key, value in written.items():
        convert(kinds[key], value, key, "recipe")
    return document_text(written)


def written_values(recipe: Recipe) -> dict[str, object]:
    """Values of a resolved recipe file by dotted key, without absent keys."""
    return {key: _plain(value) for key, value in values(recipe).items() if value is not None}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        inner = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {name: item for name, item in inner.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
