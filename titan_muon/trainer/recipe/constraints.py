"""Relations between the keys of a recipe, and the library's errors in terms of the recipe.

The library refuses combinations of its own options, and registries unknown names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from string import Formatter

from titan_muon.options import EXPERT, OptionError
from titan_muon.registry import UnknownName
from titan_muon.trainer.recipe.schema import refuse, values
from titan_muon.trainer.recipe.sections import Recipe
from titan_muon.trainer.recipe.toml import RecipeError, value_text

Violations = Iterator[tuple[str, str]]
"""Keys that do not fit the other keys, each with the values that do, in which other keys are in braces."""


def violations(recipe: Recipe) -> Violations:
    """Every key that does not fit the other keys."""
    checks = (_placement, _data, _training, _schedule, _muon, _checkpoint)
    return chain.from_iterable(check_tables(recipe) for check_tables in checks)


def _placement(r: Recipe) -> Violations:
    placement, degrees = r.placement, r.parallelism
    if placement.replicas == "one" and not (owns(r) and degrees.data_parallel_replicate_degree > 1):
        needed = '{placement.muon} = "owned" and {parallelism.data_parallel_replicate_degree} of 2 or more'
        yield "placement.replicas", f'"one" only with {needed}'
    if placement.rule and placement.muon not in ("shard0", "owned"):
        # Another package's placement does not read these rules.
        yield "placement.rule", 'none, unless {placement.muon} is "shard0" or "owned"'
    if any(rule.placement == "shard0" and rule.owner != "balanced" for rule in placement.rule):
        yield "placement.rule", 'an owner only with placement = "owned"'


def _data(r: Recipe) -> Violations:
    data = r.data
    if data.source == "files" and not data.files:
        yield "data.files", 'at least one glob pattern, because {data.source} = "files"'
    if data.source != "files" and data.files:
        yield "data.files", 'nothing, unless {data.source} is "files"; leave out {data.source} or {data.files}'
    for key in ("text_key", "bad_rows", "token_dtype", "token_marks"):
        if data.source != "files" and getattr(data, key) != getattr(type(data), key):
            yield f"data.{key}", 'its default only, unless {data.source} is "files"'
    if data.weights and len(data.weights) != len(data.files):
        yield "data.weights", "a number for each entry of {data.files}, or none at all"
    if data.source == "hf" and data.tokenizer != "hf":
        # `bpe` trains on the documents of [data]; TorchTitan's loader has none.
        yield "data.tokenizer", '"hf" only, because {data.source} = "hf"'
    if data.tokenizer == "hf" and not data.tokenizer_path:
        yield "data.tokenizer_path", 'the folder of tokenizer.json, because {data.tokenizer} = "hf"'
    if r.validator.enable and not data.validation_fraction:
        yield "data.validation_fraction", "more than 0, because {validator.enable} = true"
    if r.validator.enable and r.validator.steps == -1 and data.source == "hf":
        # A dataset's parts end at different times, and the first rank would wait for ever.
        yield "validator.steps", '1 or more, because {data.source} = "hf"'


def _training(r: Recipe) -> Violations:
    training, degrees = r.training, r.parallelism
    if training.local_batch_size == training.global_batch_size == -1:
        yield "training.local_batch_size", "1 or more, because {training.global_batch_size} = -1"
    if r.loss.chunks != "auto" and (training.seq_len // degrees.context_parallel_degree) % r.loss.chunks:
        yield "loss.chunks", '"auto", or a divisor of {training.seq_len} / {parallelism.context_parallel_degree}'
    if r.activation_checkpoint.mode == "memory_budget" and not compiles_the_model(r):
        unless = '{compile.enable} = true and {compile.components} has "model"'
        yield "activation_checkpoint.mode", f'not "memory_budget", unless {unless}'
    if r.compile.enable_async_tensor_parallel and not (compiles_the_model(r) and degrees.tensor_parallel_degree > 1):
        needed = '{compile.enable} = true, "model" in {compile.components} and tensor parallelism'
        yield "compile.enable_async_tensor_parallel", f"true only with {needed}"
    profiler = r.profiler
    if profiler.enable_profiling and profiler.profile_freq < profiler.profiler_warmup + profiler.profiler_active:
        # TorchTitan asserts this without the key, after the model is built.
        because = "because {profiler.enable_profiling} = true"
        yield "profiler.profile_freq", f"profiler_warmup + profiler_active or more, {because}"


def _schedule(r: Recipe) -> Violations:
    schedule = r.lr_scheduler
    total = r.training.steps if schedule.total_steps is None else schedule.total_steps
    if total < r.training.steps:
        # The rate would fall below zero after the end of the schedule.
        yield "lr_scheduler.total_steps", "{training.steps} or more, or left out"
    # TorchTitan would shorten warm-up and decay, so the rates would differ from the recipe's.
    if schedule.warmup_steps > total:
        accepted = "at most the steps of the schedule ({lr_scheduler.total_steps}, or {training.steps})"
        yield "lr_scheduler.warmup_steps", accepted
    if schedule.decay_ratio is not None and round(total * schedule.decay_ratio) + schedule.warmup_steps > total:
        steps = "{training.steps}" if schedule.total_steps is None else "{lr_scheduler.total_steps}"
        yield "lr_scheduler.decay_ratio", f"a share of {steps} that leaves room for {{lr_scheduler.warmup_steps}}"


def _muon(r: Recipe) -> Violations:
    key, overlap = "muon.overlap", r.muon.overlap
    if overlap != "none" and r.parallelism.pipeline_parallel_degree > 1:
        yield key, '"none" with pipeline parallelism'
    if overlap != "none" and not r.training.disable_cuda_graphs:
        # A replayed graph calls no hooks.
        yield key, '"none" with {training.disable_cuda_graphs} = false'
    if overlap == "forward" and r.qk_clip.mode == "clip":
        yield key, '"none" with {qk_clip.mode} = "clip", which scales weights'


def _checkpoint(r: Recipe) -> Violations:
    # TorchTitan's checks come later and do not name the file.
    checkpoint, path = r.checkpoint, r.checkpoint.initial_load_path
    if checkpoint.initial_load_in_hf and path is None and r.model.hf_assets_path is None:
        needed = "{checkpoint.initial_load_path} or {model.hf_assets_path}"
        yield "checkpoint.initial_load_in_hf", f"true only with {needed}"
    if checkpoint.initial_load_in_hf_quantized and not (checkpoint.initial_load_in_hf and path is not None):
        needed = "{checkpoint.initial_load_in_hf} = true and {checkpoint.initial_load_path}"
        yield "checkpoint.initial_load_in_hf_quantized", f"true only with {needed}"
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield "checkpoint.initial_load_model_only", "true only, because {checkpoint.initial_load_in_hf} = true"
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        yield "checkpoint.last_save_model_only", "true only, because {checkpoint.last_save_in_hf} = true"


def compiles_the_model(recipe: Recipe) -> bool:
    """Whether torch.compile compiles the model."""
    return recipe.compile.enable and "model" in recipe.compile.components


def owns(recipe: Recipe) -> bool:
    """Whether the recipe owns any matrix."""
    return recipe.placement.muon == "owned" or any(rule.placement == "owned" for rule in recipe.placement.rule)


def named_keys(accepted: str) -> tuple[str, list[str]]:
    """A violation's text without braces, and the keys that were in braces."""
    parts = [(text, name or "") for text, name, *_ in Formatter().parse(accepted)]
    return "".join(text + name for text, name in parts), list(dict.fromkeys(name for _, name in parts if name))


def check(recipe: Recipe, sources: Mapping[str, str], file: str) -> None:
    """Raise RecipeError for the first violation.

    `sources`: file or command line by key; `file`: source of the other keys.
    """
    current = values(recipe)
    for key, accepted in violations(recipe):
        text, others = named_keys(accepted)
        shown = ", ".join(
            f"{name} = {value_text(current[name])} ({sources.get(name, 'default')})"
            for name in others
            if name != key and current[name] is not None
        )
        raise refuse(sources.get(key, file), key, current[key], f"{text}. Here {shown}" if shown else text)


def recipe_error(error: Exception) -> RecipeError:
    """A library error in terms of the recipe: a keyword of Muon becomes a key."""
    if isinstance(error, UnknownName):
        return RecipeError(error.problem, key=error.key)
    if not isinstance(error, OptionError):
        return RecipeError(str(error))
    key = error.option
    if key.startswith("rules"):
        key = f"optimizer.rule{key.removeprefix('rules')}"
    elif key == "offload":
        key = "optimizer.offload"
    elif key.partition(".")[0] in EXPERT:
        key = f"muon.expert.{key}"
    elif "." not in key:
        key = f"muon.{key}"
    return RecipeError(error.problem, key=key)


@contextmanager
def as_recipe_errors() -> Iterator[None]:
    """Context in which an error of the library or of TorchTitan becomes an error of the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise recipe_error(error) from error
