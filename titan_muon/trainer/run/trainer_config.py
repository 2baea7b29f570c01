"""TorchTitan's configuration of a recipe. Needs no process group."""

import dataclasses
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
    QuantizationConverter,
)
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.profiler import Profiler

from titan_muon.trainer.assign.container import optimizer_config
from titan_muon.trainer.data.loader import dataloader_config
from titan_muon.trainer.data.tokenizers import check_vocabulary, tokenizer_config, vocab_size
from titan_muon.trainer.data.validation import HeldOutValidator
from titan_muon.trainer.device import loss_chunks, on_accelerator, passes_dtype, this_device
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.qk_clip import observe_logits
from titan_muon.trainer.model.spec import check_modules, model_spec, whole_model
from titan_muon.trainer.recipe import Recipe, RecipeError, to_toml
from titan_muon.trainer.recipe.constraints import compiles_the_model, owns
from titan_muon.trainer.recipe.degrees import local_batch_size
from titan_muon.trainer.recipe.sections import ActivationCheckpoint
from titan_muon.trainer.recipe.toml import without_password
from titan_muon.trainer.run.checkpoints import RunCheckpoints
from titan_muon.trainer.run.metrics import RunMetrics
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.signals import StopSignals
from titan_muon.trainer.run.trainer import MuonTrainer
from titan_muon.trainer.run_folder import RunFolder
from titan_muon.trainer.torchtitan import compat


def trainer_config(recipe: Recipe, run: Run, world_size: int, stop: StopSignals | None = None) -> MuonTrainer.Config:
    """TorchTitan's configuration of a recipe. Raises ValueError for an impossible model, data or optimizer.

    `stop`: requests to end the run; None without any.
    """
    model, degrees = recipe.model, recipe.parallelism
    stop = StopSignals() if stop is None else stop
    tokens = vocab_size(recipe.data)
    vocabulary = tokens if model.vocab_size is None else model.vocab_size
    if tokens is not None and vocabulary is not None:
        check_vocabulary(tokens, vocabulary)
    spec = model_spec(model.name, model.flavor, vocab_size=vocabulary, attention=model.attention)
    check_modules(spec, model.name)
    observe_logits(spec.model, recipe.qk_clip)
    _check_sequences(recipe, spec.model)
    _check_backend(recipe)
    return MuonTrainer.Config(
        stop=stop,
        clip=recipe.optimizer.clip,
        qk_clip=recipe.qk_clip,
        converters=_converters(recipe),
        model_spec=with_placement(spec, recipe),
        hf_assets_path=_folder("model.hf_assets_path", model.hf_assets_path, "a model's Hugging Face folder") or "",
        dump_folder=run.folder,
        tokenizer=tokenizer_config(recipe.data, RunFolder(run.source or run.folder).tokenizer),
        dataloader=dataloader_config(recipe.data),
        optimizer=optimizer_config(recipe, whole_model(spec) if degrees.pipeline_parallel_degree > 1 else None),
        lr_scheduler=_same_keys(LRSchedulersContainer.Config, recipe.lr_scheduler),
        training=_same_keys(
            TrainingConfig,
            recipe.training,
            local_batch_size=local_batch_size(recipe, world_size),
            mixed_precision_param=passes_dtype(recipe.training.mixed_precision_param, this_device()),
        ),
        parallelism=_parallelism_config(recipe, decoder_vocab_size(spec)),
        checkpoint=_checkpoint_config(recipe, run),
        activation_checkpoint=_activation_checkpoint(recipe.activation_checkpoint),
        compile=_same_keys(CompileConfig, recipe.compile, components=list(recipe.compile.components)),
        comm=comm_config(recipe),
        metrics=_metrics_config(recipe, run),
        validator=_validator_config(recipe, stop),
        profiler=_same_keys(Profiler.Config, recipe.profiler),
        debug=_same_keys(DebugConfig, recipe.debug, without=["check_replicas_freq"], enable_structured_logging=False),
        check_replicas_freq=recipe.debug.check_replicas_freq,
        loss=_loss_config(recipe, decoder_vocab_size(spec)),
    )


def _same_keys(config: type[Any], section: Any, *, without: Collection[str] = (), **others: Any) -> Any:
    """TorchTitan's `config` with the values of a recipe's table. Raises TypeError for a key renamed by TorchTitan."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return config(**({key: value for key, value in values.items() if key not in without} | others))


def comm_config(recipe: Recipe) -> CommConfig:
    """Time-outs of collectives."""
    return _same_keys(CommConfig, recipe.comm)


def _parallelism_config(recipe: Recipe, vocabulary: int) -> ParallelismConfig:
    degrees = recipe.parallelism
    uneven = vocabulary % degrees.tensor_parallel_degree != 0
    backend = compat.spmd_backend(degrees.spmd_backend, owned=owns(recipe), uneven_vocabulary=uneven)
    parts, balancer = degrees.module_fqns_per_model_part, degrees.context_parallel_load_balancer
    return _same_keys(
        ParallelismConfig,
        degrees,
        spmd_backend=backend,
        context_parallel_load_balancer=None if balancer == "none" else balancer,
        # TorchTitan takes lists.
        module_fqns_per_model_part=None if parts is None else [list(part) for part in parts],
        # A dry run may plan for another machine.
        enable_fsdp_symm_mem=degrees.enable_fsdp_symm_mem and on_accelerator(),
    )


def _checkpoint_config(recipe: Recipe, run: Run) -> RunCheckpoints.Config:
    section = recipe.checkpoint
    # A continued run ignores this path, which may be gone by then.
    if run.checkpoint is None:
        path = _folder("checkpoint.initial_load_path", section.initial_load_path, "the folder of a checkpoint's step")
        is_local = path is not None and not section.initial_load_in_hf and "://" not in path
        if path is not None and is_local and not Path(path, ".metadata").is_file():
            raise RecipeError(
                f"= {path!r} has no .metadata, so it is not a whole checkpoint; name a "
                "folder such as RUN/checkpoint/step-100",
                key="checkpoint.initial_load_path",
            )
    return _same_keys(
        RunCheckpoints.Config,
        section,
        # Rank 0 has resolved these keys to `run.checkpoint`.
        without=["freq", "load", "load_step", "exclude_from_loading"],
        interval=section.freq,
        resume=run.checkpoint,
        run=run.id,
        excluded=() if run.restarted else section.exclude_from_loading,
        # TorchTitan warns about the default if there is nothing to load.
        initial_load_model_only=section.initial_load_model_only and section.initial_load_path is not None,
    )


def _activation_checkpoint(section: ActivationCheckpoint) -> ActivationCheckpointing.Config | None:
    if section.mode == "none":
        return None
    kinds: dict[str, Any] = {"selective": SelectiveAC, "full": FullAC, "memory_budget": MemoryBudgetAC}
    config = kinds[section.mode].Config
    known = {field.name for field in dataclasses.fields(config)}
    values = dataclasses.asdict(section)
    values["force_recompute_mm_shapes_by_fqns"] = list(section.force_recompute_mm_shapes_by_fqns)
    return config(**{key: value for key, value in values.items() if key in known})


def _folder(key: str, path: str | None, takes: str) -> str | None:
    """The path, if it is absent, a URL or a folder."""
    if path is not None and "://" not in path and not Path(path).is_dir():
        raise RecipeError(f"= {path!r}: no such folder; it takes {takes}", key=key)
    return path


def _check_sequences(recipe: Recipe, model: Any) -> None:
    # TorchTitan's check names neither the key nor the remedy.
    length, most = recipe.training.seq_len, getattr(model, "max_seq_len", None)
    if most is not None and length > most:
        raise RecipeError(
            f"= {length} exceeds the {most} positions of model.flavor = {recipe.model.flavor!r}; "
            f"set it to {most} or less, or choose another flavor",
            key="training.seq_len",
        )


def _check_backend(recipe: Recipe) -> None:
    # No tag excluded, because "eager" has the tag "debug".
    if recipe.compile.enable and recipe.compile.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join([*torch.compiler.list_backends(), "eager", "aot_eager"])
        raise RecipeError(
            f"= {recipe.compile.backend!r}: torch.compile has no such backend; it has {known}", key="compile.backend"
        )


def _metrics_config(recipe: Recipe, run: Run) -> RunMetrics.Config:
    return _same_keys(
        RunMetrics.Config,
        recipe.metrics,
        total_steps=recipe.training.steps,
        first_step=run.step + 1,
        seconds_before=run.seconds,
        recipe=without_password(to_toml(recipe)),
        run=run.id or "",
        # No escape codes in a scheduler's log file.
        disable_color_printing=recipe.metrics.disable_color_printing or not sys.stdout.isatty(),
    )


def _validator_config(recipe: Recipe, stop: StopSignals) -> HeldOutValidator.Config:
    if not recipe.validator.enable:
        return HeldOutValidator.Config(enable=False, steps=recipe.validator.steps)
    return _same_keys(
        HeldOutValidator.Config,
        recipe.validator,
        dataloader=dataloader_config(recipe.data, validation=True),
        global_batch_size=recipe.training.global_batch_size,
        is_stopping=lambda: stop.stopping,
    )


def _loss_config(recipe: Recipe, vocabulary: int) -> BaseLoss.Config:
    entropy = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    tokens = recipe.training.seq_len // recipe.parallelism.context_parallel_degree
    chunks = loss_chunks(recipe.loss.chunks, tokens)
    return entropy if chunks == 1 else ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=entropy)


def _converters(recipe: Recipe) -> tuple[QuantizationConverter.Config, ...]:
    """TorchTitan's converters for a model's configuration, which refuse missing hardware and packages when built."""
    compiled = {"model_compile_enabled": compiles_the_model(recipe)}
    float8, mxfp8, nvfp4 = recipe.float8, recipe.mxfp8, recipe.nvfp4
    made: list[QuantizationConverter.Config] = []
    if float8.linear:
        options = {"recipe_name": float8.recipe_name, "filter_fqns": list(float8.filter_fqns)}
        made.append(Float8LinearConverter.Config(**options, emulate=float8.emulate, **compiled))
    if float8.experts:
        made.append(Float8GroupedExpertsConverter.Config(**compiled))
    if mxfp8.linear:
        made.append(MXFP8LinearConverter.Config(fqns=list(mxfp8.fqns), **compiled))
    if mxfp8.experts:
        made.append(MXFP8GroupedExpertsConverter.Config(pad_multiple=mxfp8.pad_multiple, **compiled))
    if nvfp4.linear:
        made.append(NVFP4LinearConverter.Config(fqns=list(nvfp4.fqns), **compiled))
    return tuple(made)
