"""A recipe as TorchTitan's configuration, table by table. Builds nothing and asks no process group."""

import dataclasses
import sys
from typing import Any

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.profiler import Profiler

from titan_muon.titan import compat
from titan_muon.titan.data.loader import dataloader_config, tokenizer_config, vocab_size
from titan_muon.titan.data.validation import HeldOutValidator
from titan_muon.titan.model.parallelize import with_placement
from titan_muon.titan.model.spec import model_spec
from titan_muon.titan.optimizers import optimizer_config
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml
from titan_muon.titan.run.checkpoints import RunCheckpoints
from titan_muon.titan.run.metrics import RunMetrics
from titan_muon.titan.run.runs import Run
from titan_muon.titan.run.trainer import MuonTrainer

LOSS_CHUNKS = 8
"""Pieces of the sequence whose logits exist at one time on an accelerator; TorchTitan's own number."""

ACTIVATION_CHECKPOINT: dict[str, ActivationCheckpointing.Config | None] = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
}


def trainer_config(recipe: Recipe, run: Run) -> MuonTrainer.Config:
    """TorchTitan's configuration of a recipe, for a run kept in `run.folder`.

    Raises RecipeError or ValueError for a model, data or optimizers that cannot be had.
    """
    if compat.install():
        _refuse_on_cpu(recipe)
    model, balancer = recipe.model, recipe.parallelism.context_parallel_load_balancer
    vocabulary = vocab_size(recipe.data) if model.vocab_size is None else model.vocab_size
    spec = model_spec(model.name, model.flavor, vocab_size=vocabulary, attention=model.attention)
    return MuonTrainer.Config(
        clip=recipe.optimizer.clip,
        model_spec=with_placement(spec, recipe),
        dump_folder=run.folder,
        tokenizer=tokenizer_config(recipe.data),
        dataloader=dataloader_config(recipe.data),
        optimizer=optimizer_config(recipe),
        lr_scheduler=_same_keys(LRSchedulersContainer.Config, recipe.lr_scheduler),
        training=_same_keys(TrainingConfig, recipe.training),
        parallelism=_same_keys(
            ParallelismConfig,
            recipe.parallelism,
            spmd_backend=compat.spmd_backend(recipe.parallelism.spmd_backend, owned=recipe.placement.muon == "owned"),
            context_parallel_load_balancer=None if balancer == "none" else balancer,
        ),
        checkpoint=_checkpoint_config(recipe, run),
        activation_checkpoint=ACTIVATION_CHECKPOINT[recipe.activation_checkpoint.mode],
        compile=_same_keys(CompileConfig, recipe.compile, components=list(recipe.compile.components)),
        comm=comm_config(recipe),
        metrics=_metrics_config(recipe, run),
        validator=_validator_config(recipe),
        profiler=_same_keys(Profiler.Config, recipe.profiler),
        debug=_same_keys(DebugConfig, recipe.debug, enable_structured_logging=False),
        loss=_loss_config(recipe, decoder_vocab_size(spec)),
    )


def comm_config(recipe: Recipe) -> CommConfig:
    """Time-outs of collectives."""
    return _same_keys(CommConfig, recipe.comm)


def _same_keys(config: type[Any], section: Any, **others: Any) -> Any:
    """An instance of TorchTitan's `config` with every key of `section`, which has the same names, and `others`."""
    # A key that TorchTitan renames is a TypeError here, at once, instead of a setting that nothing reads.
    return config(**(_values(section) | others))


def _values(section: Any) -> dict[str, Any]:
    # Not asdict: it would turn the sections inside this one into dicts.
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def _refuse_on_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for what needs an accelerator, where PyTorch would fail at the first use."""
    if recipe.checkpoint.enable and recipe.checkpoint.async_mode == "async_with_pinned_mem":
        raise RecipeError(
            'checkpoint.async_mode = "async_with_pinned_mem" is not accepted on the CPU, which pins no memory; '
            'use "async".'
        )
    if recipe.profiler.enable_memory_snapshot:
        raise RecipeError(
            "profiler.enable_memory_snapshot = true is not accepted on the CPU, whose memory is not traced."
        )


def _checkpoint_config(recipe: Recipe, run: Run) -> RunCheckpoints.Config:
    values = _values(recipe.checkpoint)
    # Rank 0 has found what they ask for, once for all ranks: it is `run.checkpoint`.
    del values["load"], values["load_step"]
    values["exclude_from_loading"] = [] if run.restarted else list(recipe.checkpoint.exclude_from_loading)
    # TorchTitan warns about the default when there is nothing to load.
    values["initial_load_model_only"] &= recipe.checkpoint.initial_load_path is not None
    return RunCheckpoints.Config(**values, resume=run.checkpoint)


def _metrics_config(recipe: Recipe, run: Run) -> RunMetrics.Config:
    return _same_keys(
        RunMetrics.Config,
        recipe.metrics,
        total_steps=recipe.training.steps,
        first_step=run.step + 1,
        seconds_before=run.seconds,
        recipe=to_toml(recipe),
        # Escape codes are noise in the file that a scheduler collects.
        disable_color_printing=recipe.metrics.disable_color_printing or not sys.stdout.isatty(),
    )


def _validator_config(recipe: Recipe) -> HeldOutValidator.Config:
    # Without a loader: a recipe whose data holds nothing out is refused only where it is validated.
    if not recipe.validator.enable:
        return HeldOutValidator.Config(enable=False, steps=recipe.validator.steps)
    return _same_keys(
        HeldOutValidator.Config, recipe.validator, dataloader=dataloader_config(recipe.data, validation=True)
    )


def _loss_config(recipe: Recipe, vocabulary: int) -> BaseLoss.Config:
    entropy = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    tokens = recipe.training.seq_len // recipe.parallelism.context_parallel_degree
    # All logits at once can be the largest activation on a GPU. On the CPU memory is not short, and one matrix product
    # is faster than eight.
    if compat.install() or tokens % LOSS_CHUNKS:
        return entropy
    return ChunkedLossWrapper.Config(num_chunks=LOSS_CHUNKS, loss_fn=entropy)
