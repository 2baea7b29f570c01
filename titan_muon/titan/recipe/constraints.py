"""Validation of a recipe's values: ranges of fields, and relations between keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from titan_muon.options import SLOWEST_IN_BFLOAT16, Constraint, OptionError, Overlap, PlacementRule, constraints
from titan_muon.titan.recipe.schema import refuse, values
from titan_muon.titan.recipe.sections import AdamW, Recipe, Rule
from titan_muon.titan.recipe.toml import RecipeError, value_text

CONSTRAINTS: Mapping[str, Constraint] = dict(constraints(Recipe)) | {
    f"{table}.{key}": constraint
    for table, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and is_dataclass(kind)
    for key, constraint in constraints(kind)
}


@dataclass(frozen=True)
class Relation:
    """A condition on `key` and the rest of the recipe; `accepted` is its text."""

    key: str
    accepted: str
    holds: Callable[[Recipe], bool]


def _held_by_bfloat16(name: str) -> Relation:
    def holds(recipe: Recipe) -> bool:
        table: AdamW = getattr(recipe, name)
        return table.state_dtype != "bfloat16" or max(table.betas) <= SLOWEST_IN_BFLOAT16

    accepted = f"each at most {SLOWEST_IN_BFLOAT16}, since bfloat16 stops slower averages"
    return Relation(f"{name}.betas", f'{accepted} ({name}.state_dtype = "bfloat16")', holds)


def _overlaps(what: str, without: Callable[[Recipe], bool], only: str = "") -> Relation:
    refused = [choice for choice in get_args(Overlap) if choice != "none" and only in ("", choice)]

    def holds(recipe: Recipe) -> bool:
        return recipe.muon.overlap not in refused or without(recipe)

    accepted = " or ".join(f'"{choice}"' for choice in get_args(Overlap) if choice not in refused)
    return Relation("muon.overlap", f"{accepted} with {what}", holds)


def _compiles_the_model(recipe: Recipe) -> bool:
    return recipe.compile.enable and "model" in recipe.compile.components


RELATIONS = (
    Relation(
        "placement.replicas",
        '"one" only with placement.muon = "owned" and parallelism.data_parallel_replicate_degree of 2 or more',
        lambda r: r.placement.replicas != "one" or (owns(r) and r.parallelism.data_parallel_replicate_degree > 1),
    ),
    Relation(
        "placement.tensor_parallel",
        '"whole" only with placement.muon = "owned" and parallelism.tensor_parallel_degree of 2 or more',
        lambda r: r.placement.tensor_parallel != "whole" or (owns(r) and r.parallelism.tensor_parallel_degree > 1),
    ),
    Relation(
        "muon.state",
        '"replicated" only, because owned matrices have their momentum on their owner alone (placement)',
        lambda recipe: recipe.muon.state == "replicated" or not owns(recipe),
    ),
    Relation(
        "muon.tensor_parallel",
        '"owner" only, unless parallelism.tensor_parallel_degree is 2 or more, '
        'and with owned matrices placement.tensor_parallel = "peers"',
        lambda r: (
            r.muon.tensor_parallel == "owner"
            or (r.parallelism.tensor_parallel_degree > 1 and (r.placement.tensor_parallel == "peers" or not owns(r)))
        ),
    ),
    # Another package's placement does not read these rules.
    Relation(
        "placement.rule",
        'none, unless placement.muon is "shard0" or "owned"',
        lambda recipe: not recipe.placement.rule or recipe.placement.muon in ("shard0", "owned"),
    ),
    Relation(
        "data.files",
        'at least one glob pattern, because data.source = "files"',
        lambda recipe: recipe.data.source != "files" or bool(recipe.data.files),
    ),
    # `bpe` trains on the documents of [data]; TorchTitan's loader has none.
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
        "training.local_batch_size",
        "1 or more, because training.global_batch_size = -1",
        lambda recipe: recipe.training.local_batch_size != -1 or recipe.training.global_batch_size != -1,
    ),
    # A dataset's parts end at different times, and the first rank would wait for ever.
    Relation(
        "validator.steps",
        '1 or more, because data.source = "hf"',
        lambda recipe: not recipe.validator.enable or recipe.validator.steps != -1 or recipe.data.source != "hf",
    ),
    Relation(
        "parallelism.pipeline_parallel_microbatch_size",
        "a divisor of training.local_batch_size under pipeline parallelism",
        lambda recipe: (
            recipe.parallelism.pipeline_parallel_degree == 1
            or recipe.training.local_batch_size == -1
            or recipe.training.local_batch_size % recipe.parallelism.pipeline_parallel_microbatch_size == 0
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
        lambda recipe: scheduled_steps(recipe) >= recipe.training.steps,
    ),
    # TorchTitan would shorten both, so the rates would differ from the recipe's.
    Relation(
        "lr_scheduler.warmup_steps",
        "at most the steps of the schedule (lr_scheduler.total_steps, or training.steps)",
        lambda recipe: recipe.lr_scheduler.warmup_steps <= scheduled_steps(recipe),
    ),
    Relation(
        "lr_scheduler.decay_ratio",
        "a share that leaves room for lr_scheduler.warmup_steps in the schedule",
        lambda recipe: (
            recipe.lr_scheduler.decay_ratio is None
            or round(scheduled_steps(recipe) * recipe.lr_scheduler.decay_ratio) + recipe.lr_scheduler.warmup_steps
            <= scheduled_steps(recipe)
        ),
    ),
    Relation(
        "muon.ns_coefficients",
        "as many [a, b, c] as muon.ns_steps",
        lambda r: isinstance(r.muon.ns_coefficients, str) or len(r.muon.ns_coefficients) == r.muon.ns_steps,
    ),
    _overlaps('placement.muon = "owned", whose steps exchange nothing', lambda r: r.placement.muon != "owned"),
    _overlaps('optimizer.clip = "all", which scales gradients', lambda r: r.optimizer.clip != "all", "backward"),
    _overlaps('qk_clip.mode = "clip", which scales weights', lambda r: r.qk_clip.mode != "clip", "forward"),
    _overlaps("pipeline parallelism", lambda recipe: recipe.parallelism.pipeline_parallel_degree == 1),
    # A replayed graph calls no hooks.
    _overlaps("training.disable_cuda_graphs = false", lambda recipe: recipe.training.disable_cuda_graphs),
    _held_by_bfloat16("adamw"),
    Relation(
        "data.num_workers",
        '0 only, unless data.source = "hf"',
        lambda recipe: recipe.data.num_workers == 0 or recipe.data.source == "hf",
    ),
    Relation(
        "data.prefetch_factor",
        "nothing, because data.num_workers = 0",
        lambda recipe: recipe.data.prefetch_factor is None or recipe.data.num_workers > 0,
    ),
    Relation(
        "data.persistent_workers",
        "false only, because data.num_workers = 0",
        lambda recipe: not recipe.data.persistent_workers or recipe.data.num_workers > 0,
    ),
    Relation(
        "data.pin_memory",
        'false only, unless data.source = "hf": other sources pin by themselves',
        lambda recipe: not recipe.data.pin_memory or recipe.data.source == "hf",
    ),
    # TorchTitan asserts this without the key, after the model is built.
    Relation(
        "profiler.profile_freq",
        "profiler_warmup + profiler_active or more, because profiler.enable_profiling = true",
        lambda recipe: (
            not recipe.profiler.enable_profiling
            or recipe.profiler.profile_freq >= recipe.profiler.profiler_warmup + recipe.profiler.profiler_active
        ),
    ),
    Relation(
        "activation_checkpoint.mode",
        'not "memory_budget", unless compile.enable = true and compile.components has "model"',
        lambda recipe: recipe.activation_checkpoint.mode != "memory_budget" or _compiles_the_model(recipe),
    ),
    Relation(
        "compile.enable_async_tensor_parallel",
        'true only with compile.enable = true, "model" in compile.components and tensor parallelism',
        lambda recipe: (
            not recipe.compile.enable_async_tensor_parallel
            or (_compiles_the_model(recipe) and recipe.parallelism.tensor_parallel_degree > 1)
        ),
    ),
    # torch.compile does not support emulated products; experts have no emulation.
    Relation(
        "float8.emulate",
        "true only with float8.linear = true, float8.experts = false and a model that is not compiled",
        lambda recipe: (
            not recipe.float8.emulate
            or (recipe.float8.linear and not recipe.float8.experts and not _compiles_the_model(recipe))
        ),
    ),
    Relation(
        "debug.deterministic_warn_only",
        "false only, because debug.deterministic = false",
        lambda recipe: not recipe.debug.deterministic_warn_only or recipe.debug.deterministic,
    ),
    Relation(
        "checkpoint.enable_first_step_checkpoint",
        "false only, because checkpoint.load_only = true",
        lambda recipe: not (recipe.checkpoint.enable_first_step_checkpoint and recipe.checkpoint.load_only),
    ),
    Relation(
        "checkpoint.initial_load_in_hf",
        "true only with checkpoint.initial_load_path or model.hf_assets_path",
        lambda recipe: (
            not recipe.checkpoint.initial_load_in_hf
            or recipe.checkpoint.initial_load_path is not None
            or recipe.model.hf_assets_path is not None
        ),
    ),
    Relation(
        "checkpoint.initial_load_in_hf_quantized",
        "true only with checkpoint.initial_load_in_hf = true and checkpoint.initial_load_path",
        lambda recipe: (
            not recipe.checkpoint.initial_load_in_hf_quantized
            or (recipe.checkpoint.initial_load_in_hf and recipe.checkpoint.initial_load_path is not None)
        ),
    ),
    # Earlier than TorchTitan's checks, which import torch and do not name the file.
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


def owns(recipe: Recipe) -> bool:
    """Whether any parameter has an owned placement."""
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
    for name, value in rule.options.items():
        _check_value(CONSTRAINTS.get(f"{rule.optimizer}.{name}"), value, f"{place}.options.{name}", source)
    if rule.optimizer in ("muon", "adamw"):
        # Check together: a rule may set ns_steps and inherit ns_coefficients from [muon].
        table: Any = getattr(recipe, rule.optimizer)
        tables: dict[str, Any] = {rule.optimizer: replace(table, **rule.options)}
        changed = replace(recipe, **tables)
        _check_relations(changed, f" under {place}.options", {}, source)


def _check_value(constraint: Constraint | None, value: object, key: str, source: str) -> None:
    if constraint is not None and value is not None and not constraint.holds(value):
        raise refuse(source, key, value, constraint.accepted)


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
    # Convert every size in the message: the user wrote 0.5 (GiB), not 536870912.
    sizes = re.compile(r"(?<=^= )\d+|\d+(?= bytes)")
    problem = sizes.sub(lambda size: f"{int(size[0]) / 2**30:.3g}", error.problem).replace(" bytes", " GiB")
    return RecipeError(f"muon.buffer_gib {problem}")
