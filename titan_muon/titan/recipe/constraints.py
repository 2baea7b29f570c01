"""What a recipe's values must satisfy beyond their types: one table by key, and one of relations between keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_muon.titan.recipe.schema import refuse, values

if TYPE_CHECKING:
    from titan_muon.titan.recipe.recipe import Recipe


@dataclass(frozen=True)
class Constraint:
    """A condition on one key's value, and its wording."""

    accepted: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Relation:
    """A condition that `key` must satisfy given the rest of the recipe, and its wording."""

    key: str
    accepted: str
    holds: Callable[["Recipe"], bool]


def at_least(low: float, but: int | None = None) -> Constraint:
    """Numbers from `low` on, and the one exception `but`."""
    also = "" if but is None else f"{but}, or "
    return Constraint(f"{also}{low} or more", lambda value: value >= low or value == but)


def from_to(low: float, high: float) -> Constraint:
    """The closed interval from `low` to `high`."""
    return Constraint(f"a number from {low} to {high}", lambda value: low <= value <= high)


def below(low: float, high: float) -> Constraint:
    """The interval from `low`, included, to `high`, excluded."""
    return Constraint(f"a number from {low} to less than {high}", lambda value: low <= value < high)


def one_of(*names: str) -> Constraint:
    """Any of these names."""
    return Constraint(f"one of {', '.join(names)}", lambda value: value in names)


def each(inner: Constraint) -> Constraint:
    """A list whose every element satisfies `inner`."""
    return Constraint(f"a list, each element {inner.accepted}", lambda value: all(map(inner.holds, value)))


COUNT = at_least(1)
NOT_NEGATIVE = at_least(0)
POSITIVE = Constraint("more than 0", lambda value: value > 0)
DECAY = below(0, 1)
TEXT = Constraint("a string that is not empty", lambda value: bool(value.strip()))
FILE_NAME = Constraint(
    "a name that is not empty and has no slash",
    lambda value: bool(value.strip()) and not {"/", "\\"} & set(value) and value not in (".", ".."),
)
PATH_FROM_ROOT = Constraint("an absolute path or a URL", lambda value: value.startswith("/") or "://" in value)

CONSTRAINTS: Mapping[str, Constraint] = {
    "name": FILE_NAME,
    "dump_folder": TEXT,
    "model.name": TEXT,
    "model.flavor": TEXT,
    "data.files": each(TEXT),
    "data.dataset": TEXT,
    "data.validation_fraction": DECAY,
    "data.vocab_size": at_least(258),
    "model.vocab_size": at_least(1),
    "data.seed": NOT_NEGATIVE,
    "data.cache": TEXT,
    "training.local_batch_size": COUNT,
    "training.global_batch_size": at_least(1, but=-1),
    "training.seq_len": COUNT,
    "training.steps": COUNT,
    "training.max_norm": POSITIVE,
    "training.gc_freq": COUNT,
    "parallelism.data_parallel_replicate_degree": COUNT,
    "parallelism.data_parallel_shard_degree": at_least(1, but=-1),
    "parallelism.tensor_parallel_degree": COUNT,
    "parallelism.context_parallel_degree": COUNT,
    "parallelism.expert_parallel_degree": COUNT,
    "parallelism.pipeline_parallel_degree": COUNT,
    "parallelism.pipeline_parallel_schedule": TEXT,
    "parallelism.pipeline_parallel_microbatch_size": COUNT,
    "placement.muon": TEXT,
    "muon.lr": NOT_NEGATIVE,
    "muon.momentum": DECAY,
    "muon.weight_decay": NOT_NEGATIVE,
    "muon.ns_steps": COUNT,
    "muon.ns_coefficients": Constraint("the name of a set, or a list that is not empty", bool),
    "muon.eps": POSITIVE,
    "muon.exchange": TEXT,
    "muon.buffer_gib": Constraint('"auto" or more than 0', lambda value: value == "auto" or value > 0),
    "link.bandwidth_gb": POSITIVE,
    "link.latency_us": NOT_NEGATIVE,
    "link.tflops": POSITIVE,
    "adamw.lr": NOT_NEGATIVE,
    "adamw.betas": each(DECAY),
    "adamw.eps": NOT_NEGATIVE,
    "adamw.weight_decay": NOT_NEGATIVE,
    "adam.lr": NOT_NEGATIVE,
    "adam.betas": each(DECAY),
    "adam.eps": NOT_NEGATIVE,
    "adam.weight_decay": NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": NOT_NEGATIVE,
    "lr_scheduler.total_steps": COUNT,
    "lr_scheduler.decay_ratio": from_to(0, 1),
    "lr_scheduler.min_lr_factor": from_to(0, 1),
    "validator.freq": COUNT,
    "validator.steps": COUNT,
    "checkpoint.folder": TEXT,
    "checkpoint.interval": COUNT,
    "checkpoint.load": TEXT,
    "checkpoint.load_step": at_least(0, but=-1),
    # The newest checkpoint may still be on its way to disk, so TorchTitan keeps the one before it too.
    "checkpoint.keep_latest_k": at_least(2, but=0),
    "checkpoint.initial_load_path": PATH_FROM_ROOT,
    "checkpoint.exclude_from_loading": each(one_of("optimizer", "lr_scheduler", "dataloader", "train_state")),
    "metrics.log_freq": COUNT,
    "compile.components": each(one_of("model", "loss")),
    "compile.backend": TEXT,
    "comm.init_timeout_seconds": COUNT,
    "comm.train_timeout_seconds": COUNT,
    "comm.trace_buf_size": NOT_NEGATIVE,
    "debug.seed": NOT_NEGATIVE,
    "profiler.save_traces_folder": TEXT,
    "profiler.profile_freq": COUNT,
}

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


def check(recipe: "Recipe", sources: Mapping[str, str], file: str) -> None:
    """Raise RecipeError for the first value that a constraint or a relation refuses.

    `sources` says which file, or the command line, wrote each key; `file` answers for keys left at their default.
    """
    found = values(recipe)
    for key, value in found.items():
        _check_value(key, value, key, sources.get(key, file))
    _check_relations(recipe, "", sources, file)
    for index, rule in enumerate(recipe.optimizer.rule):
        place = f"optimizer.rule[{index}]"
        source = sources.get("optimizer.rule", file)
        for name in ("match", "optimizer"):
            if not TEXT.holds(getattr(rule, name)):
                raise refuse(source, f"{place}.{name}", getattr(rule, name), TEXT.accepted)
        for name, value in rule.options.items():
            _check_value(f"{rule.optimizer}.{name}", value, f"{place}.options.{name}", source)
        if rule.optimizer == "muon":
            options: dict[str, Any] = rule.options
            changed = replace(recipe, muon=replace(recipe.muon, **options))
            _check_relations(changed, f" under {place}.options", {"muon.ns_coefficients": source}, file)


def _check_value(key: str, value: object, shown_key: str, source: str) -> None:
    constraint = CONSTRAINTS.get(key)
    if constraint is not None and value is not None and not constraint.holds(value):
        raise refuse(source, shown_key, value, constraint.accepted)


def _check_relations(recipe: "Recipe", context: str, sources: Mapping[str, str], file: str) -> None:
    found = values(recipe)
    for relation in RELATIONS:
        if not relation.holds(recipe):
            source = sources.get(relation.key, file)
            raise refuse(source, relation.key + context, found[relation.key], relation.accepted)
