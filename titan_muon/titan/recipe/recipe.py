"""The recipe: one frozen dataclass made of defaults, then bases, then the file, then the command line.

Imports neither torch nor torchtitan, so that a mistake and `--help` answer at once.
"""

import importlib.metadata
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from titan_muon.titan.recipe import constraints, flags, schema, sections, toml
from titan_muon.titan.recipe.toml import Entry, RecipeError

__all__ = ["Difference", "Recipe", "RecipeError", "check_degrees", "differences", "load", "to_toml"]

TYPED_OPTIMIZERS = ("muon", "adamw", "adam")
PIPELINE_TORCH = (2, 14)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run is: one field for each table of the TOML file, and nothing derived."""

    name: str = "recipe"
    """Name of the run; a file that gives none is named after itself."""

    dump_folder: str = "runs"
    """Folder of all runs."""

    model: sections.Model = field(default_factory=sections.Model)
    data: sections.Data = field(default_factory=sections.Data)
    training: sections.Training = field(default_factory=sections.Training)
    parallelism: sections.Parallelism = field(default_factory=sections.Parallelism)
    placement: sections.Placement = field(default_factory=sections.Placement)
    muon: sections.Muon = field(default_factory=sections.Muon)
    link: sections.Link = field(default_factory=sections.Link)
    adamw: sections.AdamW = field(default_factory=sections.AdamW)
    adam: sections.Adam = field(default_factory=sections.Adam)
    optimizer: sections.Optimizer = field(default_factory=sections.Optimizer)
    lr_scheduler: sections.LrScheduler = field(default_factory=sections.LrScheduler)
    validator: sections.Validator = field(default_factory=sections.Validator)
    checkpoint: sections.Checkpoint = field(default_factory=sections.Checkpoint)
    metrics: sections.Metrics = field(default_factory=sections.Metrics)
    activation_checkpoint: sections.ActivationCheckpoint = field(default_factory=sections.ActivationCheckpoint)
    compile: sections.Compile = field(default_factory=sections.Compile)
    comm: sections.Comm = field(default_factory=sections.Comm)
    debug: sections.Debug = field(default_factory=sections.Debug)
    profiler: sections.Profiler = field(default_factory=sections.Profiler)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file, its bases and `--section.key value` overrides, checked once.

    Raises RecipeError, with one message, for anything that a recipe does not accept.
    """
    file = Path(path)
    written = toml.read(file)
    given, rest = flags.read(Recipe, Recipe(), overrides)
    flags.refuse_rest(rest, list(schema.keys(Recipe)))
    entries = {"name": Entry(file.stem, str(file))} | written | given
    recipe = _with_typed_options(schema.build(Recipe, entries), entries)
    constraints.check(recipe, {key: entry.source for key, entry in entries.items()}, str(file))
    return recipe


def _with_typed_options(recipe: Recipe, entries: Mapping[str, Entry]) -> Recipe:
    """Give the options of each rule the types of its optimizer's own table."""
    kinds = schema.keys(Recipe)
    rules = []
    for index, rule in enumerate(recipe.optimizer.rule):
        source, place = entries["optimizer.rule"].source, f"optimizer.rule[{index}].options"
        options = rule.options
        if rule.optimizer in TYPED_OPTIMIZERS:
            prefix = f"{rule.optimizer}."
            known = {key.removeprefix(prefix): kind for key, kind in kinds.items() if key.startswith(prefix)}
            options = _typed(options, known, place, source)
        rules.append(replace(rule, options=options))
    return replace(recipe, optimizer=replace(recipe.optimizer, rule=tuple(rules)))


def _typed(options: Mapping[str, object], known: Mapping[str, Any], place: str, source: str) -> dict[str, object]:
    for name, value in options.items():
        if name not in known:
            raise schema.unknown(source, f"{place}.{name}", value, [f"{place}.{key}" for key in known])
    return {name: schema.convert(known[name], value, f"{place}.{name}", source) for name, value in options.items()}


def check_degrees(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError unless the parallel degrees, batch sizes and sequence length fit `world_size` ranks."""
    parallelism, training = recipe.parallelism, recipe.training
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    _check_pipeline(parallelism.pipeline_parallel_degree)
    shard = _shard_degree(parallelism, world_size)
    cells = shard * context * tensor
    if cells % parallelism.expert_parallel_degree:
        raise RecipeError(
            f"parallelism.expert_parallel_degree = {parallelism.expert_parallel_degree} is not accepted on "
            f"{world_size} ranks; it takes a divisor of shard x context x tensor = "
            f"{shard} x {context} x {tensor} = {cells}."
        )
    batch = training.local_batch_size * parallelism.data_parallel_replicate_degree * shard
    if training.global_batch_size != -1 and training.global_batch_size % batch:
        raise RecipeError(
            f"training.global_batch_size = {training.global_batch_size} is not accepted on {world_size} ranks; it "
            f"takes -1, or a multiple of training.local_batch_size x data-parallel ranks = {batch}."
        )
    divisor = (tensor if parallelism.enable_sequence_parallel else 1) * (2 * context if context > 1 else 1)
    if training.seq_len % divisor:
        raise RecipeError(
            f"training.seq_len = {training.seq_len} is not accepted; it takes a multiple of {divisor}: the tensor "
            "parallel degree under sequence parallel, times twice the context parallel degree above 1."
        )


def _check_pipeline(degree: int) -> None:
    version = importlib.metadata.version("torch")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if degree > 1 and numbers < PIPELINE_TORCH:
        raise RecipeError(
            f"parallelism.pipeline_parallel_degree = {degree} is not accepted; pipeline parallelism needs torch "
            f"{'.'.join(map(str, PIPELINE_TORCH))} or newer, and torch {version} is installed."
        )


def _shard_degree(parallelism: sections.Parallelism, world_size: int) -> int:
    """Ranks that share one copy of the parameters, with -1 resolved for `world_size` ranks."""
    others = {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }
    rest = math.prod(others.values())
    shard = parallelism.data_parallel_shard_degree
    if world_size % rest == 0 and shard in (-1, world_size // rest):
        return world_size // rest
    shown = " x ".join(f"{name} {degree}" for name, degree in others.items())
    wrong = f"{shown} x data_parallel_shard_degree {shard} = {rest * shard}" if shard != -1 else f"{shown} = {rest}"
    fit = f"data_parallel_shard_degree {world_size // rest} (or -1) fits"
    if world_size % rest:
        fit = f"the degrees other than data_parallel_shard_degree multiply to {rest}, which must divide {world_size}"
    relation = "does not equal" if shard != -1 else "does not divide"
    raise RecipeError(f"parallelism: {wrong} {relation} the world size {world_size}; {fit}.")


def to_toml(recipe: Recipe) -> str:
    """The recipe as one TOML file that loads again to an equal recipe, whatever that file is called.

    Raises RecipeError for a value that no file can give the recipe, such as a NaN.
    """
    kinds, defaults = schema.keys(Recipe), schema.values(Recipe())
    plain = {key: _plain(value) for key, value in schema.values(recipe).items()}
    for key, value in plain.items():
        if value is None and defaults[key] is not None:
            raise RecipeError(f"recipe: {key} = None cannot be written: TOML has no null, and absent means a default.")
        if value is not None:
            schema.convert(kinds[key], value, key, "recipe")
    return toml.document_text({key: value for key, value in plain.items() if value is not None})


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        inner = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {name: item for name, item in inner.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Difference:
    """One key in which two recipes differ, with both values as TOML text; None is an absent key."""

    key: str
    left: str | None
    right: str | None

    def __str__(self) -> str:
        left, right = ("absent" if text is None else text for text in (self.left, self.right))
        return f"{self.key}: {left} -> {right}"


def differences(a: Recipe, b: Recipe) -> list[Difference]:
    """The keys in which two recipes differ, in the order of the recipe's tables."""
    left, right = schema.values(a), schema.values(b)
    return [Difference(key, _text(left[key]), _text(right[key])) for key in left if left[key] != right[key]]


def _text(value: Any) -> str | None:
    return None if value is None else toml.value_text(_plain(value))
