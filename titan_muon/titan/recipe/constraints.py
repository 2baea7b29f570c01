"""Validation of a recipe's values: ranges of fields, and relations between keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from titan_muon import registry
from titan_muon.options import SLOWEST_IN_BFLOAT16, Constraint, OptionError, Overlap, PlacementRule, constraints
from titan_muon.titan.recipe.schema import refuse, values
from titan_muon.titan.recipe.sections import Recipe, Rule
from titan_muon.titan.recipe.toml import RecipeError, value_text

CONSTRAINTS: Mapping[str, Constraint] = dict(constraints(Recipe)) | {
    f"{table}.{key}": constraint
    for table, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and is_dataclass(kind)
    for key, constraint in constraints(kind)
}

REGISTRIES: Mapping[str, registry.Registry[Any]] = {
    "muon.algorithm": registry.algorithms,
    "placement.muon": registry.placements,
}
"""Registries with the names that a key takes."""


@dataclass(frozen=True)
class Relation:
    """A condition on `key` and the rest of the recipe; `accepted` is its text."""

    key: str
    accepted: str
    holds: Callable[[Recipe], bool]


def _default_unless(key: str, accepted: str, allows: Callable[[Recipe], bool]) -> Relation:
    """The default of `key`, unless the recipe allows other values."""
    read, default = attrgetter(key), attrgetter(key)(Recipe())
    return Relation(key, accepted, lambda recipe: read(recipe) == default or allows(recipe))


def _overlaps(what: str, without: Callable[[Recipe], bool], only: str = "") -> Relation:
    refused = [choice for choice in get_args(Overlap) if choice != "none" and only in ("", choice)]
    accepted = " or ".join(f'"{choice}"' for choice in get_args(Overlap) if choice not in refused)
    return Relation("muon.overlap", f"{accepted} with {what}", lambda r: r.muon.overlap not in refused or without(r))


def _compiles_the_model(recipe: Recipe) -> bool:
    return recipe.compile.enable and "model" in recipe.compile.components


RELATIONS = (
    Relation(
        "placement.replicas",
        '"one" only with placement.muon = "owned" and parallelism.data_parallel_replicate_degree of 2 or more',
        lambda r: r.placement.replicas != "one" or (owns(r) and r.parallelism.data_parallel_replicate_degree > 1),
    ),
    _default_unless(
        "placement.tensor_parallel",
        '"whole" only with placement.muon = "owned" and parallelism.tensor_parallel_degree of 2 or more',
        lambda r: owns(r) and r.parallelism.tensor_parallel_degree > 1,
    ),
    _default_unless(
        "muon.state",
        '"replicated" only, because owned matrices have their momentum on their owner alone (placement)',
        lambda r: not owns(r),
    ),
    _default_unless(
        "muon.tensor_parallel",
        '"owner" only, unless parallelism.tensor_parallel_degree is 2 or more, '
        'and with owned matrices placement.tensor_parallel = "peers"',
        lambda r: r.parallelism.tensor_parallel_degree > 1 and (r.placement.tensor_parallel == "peers" or not owns(r)),
    ),
    # Another package's placement does not read these rules.
    _default_unless(
        "placement.rule",
        'none, unless placement.muon is "shard0" or "owned"',
        lambda r: r.placement.muon in ("shard0", "owned"),
    ),
    Relation(
        "data.files",
        'at least one glob pattern, because data.source = "files"',
        lambda r: r.data.source != "files" or bool(r.data.files),
    ),
    Relation(
        "data.files",
        'nothing, unless data.source is "files"; leave out data.source or data.files',
        lambda r: r.data.source == "files" or not r.data.files,
    ),
    # `bpe` trains on the documents of [data]; TorchTitan's loader has none.
    Relation(
        "data.tokenizer",
        '"hf" only, because data.source = "hf"',
        lambda r: r.data.source != "hf" or r.data.tokenizer == "hf",
    ),
    Relation(
        "data.tokenizer_path",
        'the folder of tokenizer.json, because data.tokenizer = "hf"',
        lambda r: r.data.tokenizer != "hf" or bool(r.data.tokenizer_path),
    ),
    Relation(
        "data.validation_fraction",
        "more than 0, because validator.enable = true",
        lambda r: not r.validator.enable or r.data.validation_fraction > 0,
    ),
    Relation(
        "training.local_batch_size",
        "1 or more, because training.global_batch_size = -1",
        lambda r: r.training.local_batch_size != -1 or r.training.global_batch_size != -1,
    ),
    # A dataset's parts end at different times, and the first rank would wait for ever.
    Relation(
        "validator.steps",
        '1 or more, because data.source = "hf"',
        lambda r: not r.validator.enable or r.validator.steps != -1 or r.data.source != "hf",
    ),
    Relation(
        "parallelism.pipeline_parallel_microbatch_size",
        "a divisor of training.local_batch_size under pipeline parallelism",
        lambda r: (
            r.parallelism.pipeline_parallel_degree == 1
            or r.training.local_batch_size == -1
            or r.training.local_batch_size % r.parallelism.pipeline_parallel_microbatch_size == 0
        ),
    ),
    Relation(
        "loss.chunks",
        '"auto", or a divisor of training.seq_len / parallelism.context_parallel_degree',
        lambda r: (
            r.loss.chunks == "auto"
            or (r.training.seq_len // r.parallelism.context_parallel_degree) % r.loss.chunks == 0
        ),
    ),
    # The rate would fall below zero after the end of the schedule.
    Relation(
        "lr_scheduler.total_steps",
        "training.steps or more (or absent, which is training.steps)",
        lambda r: scheduled_steps(r) >= r.training.steps,
    ),
    # TorchTitan would shorten both, so the rates would differ from the recipe's.
    Relation(
        "lr_scheduler.warmup_steps",
        "at most the steps of the schedule (lr_scheduler.total_steps, or training.steps)",
        lambda r: r.lr_scheduler.warmup_steps <= scheduled_steps(r),
    ),
    Relation(
        "lr_scheduler.decay_ratio",
        "a share that leaves room for lr_scheduler.warmup_steps in the schedule",
        lambda r: (
            r.lr_scheduler.decay_ratio is None
            or round(scheduled_steps(r) * r.lr_scheduler.decay_ratio) + r.lr_scheduler.warmup_steps
            <= scheduled_steps(r)
        ),
    ),
    Relation(
        "muon.ns_coefficients",
        "as many [a, b, c] as muon.ns_steps, or one for all steps",
        lambda r: isinstance(r.muon.ns_coefficients, str) or len(r.muon.ns_coefficients) in (1, r.muon.ns_steps),
    ),
    _overlaps('placement.muon = "owned", whose steps exchange nothing', lambda r: r.placement.muon != "owned"),
    _overlaps('optimizer.clip = "all", which scales gradients', lambda r: r.optimizer.clip != "all", "backward"),
    _overlaps('qk_clip.mode = "clip", which scales weights', lambda r: r.qk_clip.mode != "clip", "forward"),
    _overlaps("pipeline parallelism", lambda r: r.parallelism.pipeline_parallel_degree == 1),
    # A replayed graph calls no hooks.
    _overlaps("training.disable_cuda_graphs = false", lambda r: r.training.disable_cuda_graphs),
    Relation(
        "adamw.betas",
        f'each at most {SLOWEST_IN_BFLOAT16}, since bfloat16 stops slower averages (adamw.state_dtype = "bfloat16")',
        lambda r: r.adamw.state_dtype != "bfloat16" or max(r.adamw.betas) <= SLOWEST_IN_BFLOAT16,
    ),
    _default_unless("data.num_workers", '0 only, unless data.source = "hf"', lambda r: r.data.source == "hf"),
    _default_unless("data.prefetch_factor", "nothing, because data.num_workers = 0", lambda r: r.data.num_workers > 0),
    _default_unless(
        "data.persistent_workers", "false only, because data.num_workers = 0", lambda r: r.data.num_workers > 0
    ),
    _default_unless(
        "data.pin_memory",
        'false only, unless data.source = "hf": other sources pin by themselves',
        lambda r: r.data.source == "hf",
    ),
    # TorchTitan asserts this without the key, after the model is built.
    Relation(
        "profiler.profile_freq",
        "profiler_warmup + profiler_active or more, because profiler.enable_profiling = true",
        lambda r: (
            not r.profiler.enable_profiling
            or r.profiler.profile_freq >= r.profiler.profiler_warmup + r.profiler.profiler_active
        ),
    ),
    Relation(
        "activation_checkpoint.mode",
        'not "memory_budget", unless compile.enable = true and compile.components has "model"',
        lambda r: r.activation_checkpoint.mode != "memory_budget" or _compiles_the_model(r),
    ),
    _default_unless(
        "compile.enable_async_tensor_parallel",
        'true only with compile.enable = true, "model" in compile.components and tensor parallelism',
        lambda r: _compiles_the_model(r) and r.parallelism.tensor_parallel_degree > 1,
    ),
    # torch.compile does not support emulated products; experts have no emulation.
    _default_unless(
        "float8.emulate",
        "true only with float8.linear = true, float8.experts = false and a model that is not compiled",
        lambda r: r.float8.linear and not r.float8.experts and not _compiles_the_model(r),
    ),
    _default_unless(
        "debug.deterministic_warn_only",
        "false only, because debug.deterministic = false",
        lambda r: r.debug.deterministic,
    ),
    _default_unless(
        "checkpoint.enable_first_step_checkpoint",
        "false only, because checkpoint.load_only = true",
        lambda r: not r.checkpoint.load_only,
    ),
    _default_unless(
        "checkpoint.initial_load_in_hf",
        "true only with checkpoint.initial_load_path or model.hf_assets_path",
        lambda r: r.checkpoint.initial_load_path is not None or r.model.hf_assets_path is not None,
    ),
    _default_unless(
        "checkpoint.initial_load_in_hf_quantized",
        "true only with checkpoint.initial_load_in_hf = true and checkpoint.initial_load_path",
        lambda r: r.checkpoint.initial_load_in_hf and r.checkpoint.initial_load_path is not None,
    ),
    # TorchTitan's checks come later and do not name the file.
    Relation(
        "checkpoint.last_save_model_only",
        "true only, because checkpoint.last_save_in_hf = true",
        lambda r: not r.checkpoint.last_save_in_hf or r.checkpoint.last_save_model_only,
    ),
    _default_unless(
        "checkpoint.initial_load_model_only",
        "true only, because checkpoint.initial_load_in_hf = true",
        lambda r: not r.checkpoint.initial_load_in_hf,
    ),
)


def owns(recipe: Recipe) -> bool:
    """Whether the recipe owns any matrix."""
    return recipe.placement.muon == "owned" or any(rule.placement == "owned" for rule in recipe.placement.rule)


def scheduled_steps(recipe: Recipe) -> int:
    """Steps of the learning-rate schedule."""
    total = recipe.lr_scheduler.total_steps
    return recipe.training.steps if total is None else total


def check(recipe: Recipe, sources: Mapping[str, str], file: str) -> None:
    """Raise RecipeError for the first violation.

    `sources`: file or command line by key; `file`: source of the other keys.
    """
    for key, value in values(recipe).items():
        _check_value(CONSTRAINTS.get(key), value, key, sources.get(key, file))
        if key in REGISTRIES:
            _check_name(REGISTRIES[key], value, key, sources.get(key, file))
    _check_relations(recipe, "", sources, file)
    for index, rule in enumerate(recipe.optimizer.rule):
        _check_rule(recipe, rule, f"optimizer.rule[{index}]", sources.get("optimizer.rule", file))
    for index, placed in enumerate(recipe.placement.rule):
        _check_placement(placed, f"placement.rule[{index}]", sources.get("placement.rule", file))


def _check_placement(rule: PlacementRule, place: str, source: str) -> None:
    for name, constraint in constraints(PlacementRule):
        _check_value(constraint, getattr(rule, name), f"{place}.{name}", source)
    if rule.placement == "shard0" and rule.owner != "balanced":
        raise refuse(source, f"{place}.owner", rule.owner, '"balanced", or an owner with placement = "owned"')


def _check_rule(recipe: Recipe, rule: Rule, place: str, source: str) -> None:
    for name, constraint in constraints(Rule):
        _check_value(constraint, getattr(rule, name), f"{place}.{name}", source)
    _check_name(registry.optimizers, rule.optimizer, f"{place}.optimizer", source)
    for name, value in rule.options.items():
        _check_value(CONSTRAINTS.get(f"{rule.optimizer}.{name}"), value, f"{place}.options.{name}", source)
    if rule.optimizer in ("muon", "adamw"):
        # A rule may set ns_steps and inherit ns_coefficients from [muon].
        table: Any = getattr(recipe, rule.optimizer)
        tables: dict[str, Any] = {rule.optimizer: replace(table, **rule.options)}
        changed = replace(recipe, **tables)
        _check_relations(changed, f" under {place}.options", {}, source)


def _check_value(constraint: Constraint | None, value: object, key: str, source: str) -> None:
    if constraint is not None and value is not None and not constraint.holds(value):
        raise refuse(source, key, value, constraint.accepted)


def _check_name(known: registry.Registry[Any], name: str, key: str, source: str) -> None:
    if name not in known:
        names = known.names()
        raise refuse(source, key, name, f"one of {', '.join(map(value_text, names))}", choices=names)


def _check_relations(recipe: Recipe, context: str, sources: Mapping[str, str], file: str) -> None:
    for relation in RELATIONS:
        if not relation.holds(recipe):
            source, current = sources.get(relation.key, file), values(recipe)
            accepted = relation.accepted + _others(relation, current, sources)
            raise refuse(source, relation.key + context, current[relation.key], accepted)


def _others(relation: Relation, current: Mapping[str, object], sources: Mapping[str, str]) -> str:
    keys = [key for key in re.findall(r"[a-z_0-9]+\.[a-z_0-9]+", relation.accepted) if key in current]
    values = [
        f"{key} = {value_text(current[key])} ({sources.get(key, 'default')})"
        for key in dict.fromkeys(keys)
        if key != relation.key and current[key] is not None
    ]
    return f". Here {', '.join(values)}" if values and sources else ""


def recipe_error(error: ValueError, table: str = "muon") -> RecipeError:
    """A library error in terms of the recipe: a keyword becomes a key of `table`, bytes become GiB."""
    if not isinstance(error, OptionError):
        return RecipeError(str(error))
    if error.option.startswith("rules"):
        return RecipeError(f"optimizer.rule{error.option.removeprefix('rules')} {error.problem}")
    if "." in error.option:
        return RecipeError(str(error))
    if error.option == "offload":
        return RecipeError(f"optimizer.offload {error.problem}")
    if error.option != "buffer_bytes":
        return RecipeError(f"{table}.{error.option} {error.problem}")
    # The user wrote 0.5 (GiB), not 536870912.
    sizes = re.compile(r"(?<=^= )\d+|\d+(?= bytes)")
    problem = sizes.sub(lambda size: f"{int(size[0]) / 2**30:.3g}", error.problem).replace(" bytes", " GiB")
    return RecipeError(f"muon.buffer_gib {problem}")
