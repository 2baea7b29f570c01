"""What a recipe's values must satisfy beyond their types: the range at each field, and relations between keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_type_hints

from titan_muon.options import Constraint, OptionError, constraints
from titan_muon.titan.recipe.schema import refuse, values
from titan_muon.titan.recipe.sections import Recipe, Rule
from titan_muon.titan.recipe.toml import RecipeError

# Derived, never written by hand: a range that stood here too could differ from the one at the field, which Muon itself
# and the table in docs/recipes.md read.
CONSTRAINTS: Mapping[str, Constraint] = dict(constraints(Recipe)) | {
    f"{table}.{key}": constraint
    for table, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and is_dataclass(kind)
    for key, constraint in constraints(kind)
}


@dataclass(frozen=True)
class Relation:
    """A condition that `key` must satisfy given the rest of the recipe, and its wording."""

    key: str
    accepted: str
    holds: Callable[[Recipe], bool]


RELATIONS = (
    Relation(
        "placement.replicas",
        '"one" only with placement.muon = "owned" and parallelism.data_parallel_replicate_degree of 2 or more',
        lambda recipe: (
            recipe.placement.replicas == "each"
            or (recipe.placement.muon == "owned" and recipe.parallelism.data_parallel_replicate_degree > 1)
        ),
    ),
    Relation(
        "data.files",
        'at least one glob pattern, because data.source = "files"',
        lambda recipe: recipe.data.source != "files" or bool(recipe.data.files),
    ),
    # `bpe` would be trained on the documents of [data], and TorchTitan's loader has none to offer.
    Relation(
        "data.tokenizer",
        '"hf" only, because data.source = "hf"',
        lambda recipe: recipe.data.source != "hf" or recipe.data.tokenizer == "hf",
    ),
    Relation(
        "data.tokenizer_path",
        'the folder of tokenizer.json, because data.tokenizer = "hf"',
        lambda recipe: recipe.data.tokenizer != "hf" or bool(recipe.data.tokenizer_path),
    ),
    Relation(
        "data.validation_fraction",
        "more than 0, because validator.enable = true",
        lambda recipe: not recipe.validator.enable or recipe.data.validation_fraction > 0,
    ),
    # Its default divides every batch, so the key matters only where there are stages to feed.
    Relation(
        "parallelism.pipeline_parallel_microbatch_size",
        "a divisor of training.local_batch_size under pipeline parallelism",
        lambda recipe: (
            recipe.parallelism.pipeline_parallel_degree == 1
            or recipe.training.local_batch_size % recipe.parallelism.pipeline_parallel_microbatch_size == 0
        ),
    ),
    Relation(
        "muon.ns_coefficients",
        "as many [a, b, c] as muon.ns_steps",
        lambda recipe: (
            isinstance(recipe.muon.ns_coefficients, str) or len(recipe.muon.ns_coefficients) == recipe.muon.ns_steps
        ),
    ),
    # TorchTitan's own check is an assertion without the key, and comes after the model is built.
    Relation(
        "profiler.profile_freq",
        "4 or more, because a trace takes 3 steps of warm-up and 1 that is recorded",
        lambda recipe: not recipe.profiler.enable_profiling or recipe.profiler.profile_freq >= 4,
    ),
    # TorchTitan refuses the next two as well, but only after torch is imported, and without the file that wrote them.
    Relation(
        "checkpoint.last_save_model_only",
        "true only, because checkpoint.last_save_in_hf = true",
        lambda recipe: not recipe.checkpoint.last_save_in_hf or recipe.checkpoint.last_save_model_only,
    ),
    Relation(
        "checkpoint.initial_load_model_only",
        "true only, because checkpoint.initial_load_in_hf = true",
        lambda recipe: not recipe.checkpoint.initial_load_in_hf or recipe.checkpoint.initial_load_model_only,
    ),
)


def check(recipe: Recipe, sources: Mapping[str, str], file: str) -> None:
    """Raise RecipeError for the first value that a constraint or a relation refuses.

    `sources` says which file, or the command line, wrote each key; `file` answers for keys left at their default.
    """
    for key, value in values(recipe).items():
        _check_value(CONSTRAINTS.get(key), value, key, sources.get(key, file))
    _check_relations(recipe, "", sources, file)
    for index, rule in enumerate(recipe.optimizer.rule):
        _check_rule(recipe, rule, f"optimizer.rule[{index}]", sources.get("optimizer.rule", file))


def _check_rule(recipe: Recipe, rule: Rule, place: str, source: str) -> None:
    for name, constraint in constraints(Rule):
        _check_value(constraint, getattr(rule, name), f"{place}.{name}", source)
    for name, value in rule.options.items():
        _check_value(CONSTRAINTS.get(f"{rule.optimizer}.{name}"), value, f"{place}.options.{name}", source)
    if rule.optimizer == "muon":
        # A rule may set ns_steps and leave ns_coefficients to [muon]: each is sound alone, and together they are not.
        options: dict[str, Any] = rule.options
        changed = replace(recipe, muon=replace(recipe.muon, **options))
        _check_relations(changed, f" under {place}.options", {}, source)


def _check_value(constraint: Constraint | None, value: object, key: str, source: str) -> None:
    if constraint is not None and value is not None and not constraint.holds(value):
        raise refuse(source, key, value, constraint.accepted)


def _check_relations(recipe: Recipe, context: str, sources: Mapping[str, str], file: str) -> None:
    found = values(recipe)
    for relation in RELATIONS:
        if not relation.holds(recipe):
            source = sources.get(relation.key, file)
            raise refuse(source, relation.key + context, found[relation.key], relation.accepted)


def recipe_error(error: ValueError) -> RecipeError:
    """What the library refuses, in the recipe's words: Muon's keyword becomes the key, and its bytes become GiB."""
    if not isinstance(error, OptionError):
        return RecipeError(str(error))
    if error.option != "buffer_bytes":
        return RecipeError(f"muon.{error.option} {error.problem}")
    # The value and every size that the planner names with it: a user who wrote 0.5 must not read 536870912.
    sizes = re.compile(r"(?<=^= )\d+|\d+(?= bytes)")
    problem = sizes.sub(lambda size: f"{int(size[0]) / 2**30:.3g}", error.problem).replace(" bytes", " GiB")
    return RecipeError(f"muon.buffer_gib {problem}")
