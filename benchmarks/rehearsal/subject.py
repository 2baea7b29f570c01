"""A recipe on a rank of a fake machine: TorchTitan's own trainer, without data, files and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.rehearsal.fake_gpu import FakeGpu
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer import MuonTrainer
from titan_muon.trainer.run.trainer_config import trainer_config


@dataclass(frozen=True)
class NoTokenizer:
    """Replaces tokenizer and configuration, because the tokenizer's file may be absent."""

    def build(self, **kwargs: Any) -> NoTokenizer:
        return self

    def get_vocab_size(self) -> int:
        """Fits any embedding."""
        return 0


@dataclass(frozen=True)
class NoData:
    """Replaces data and configuration: batches of zeros, a document each."""

    shape: tuple[int, int] = (0, 0)

    def build(self, **kwargs: Any) -> NoData:
        return NoData((kwargs["local_batch_size"], kwargs["seq_len"]))

    def close(self) -> None:
        """Nothing is open."""

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            zeros = torch.zeros(self.shape, dtype=torch.int64)
            positions = torch.arange(self.shape[1]).expand(self.shape).contiguous()
            yield {"input": zeros, "positions": positions}, zeros.clone()


def without_files(recipe: Recipe) -> Recipe:
    """The recipe without files beside the training step, and with one gradient pass per step."""
    return replace(
        recipe,
        training=replace(recipe.training, global_batch_size=-1),
        checkpoint=replace(recipe.checkpoint, enable=False),
        validator=replace(recipe.validator, enable=False),
        metrics=replace(recipe.metrics, enable_tensorboard=False, enable_wandb=False),
    )


def build_trainer(recipe: Recipe, world_size: int, gpu: FakeGpu, folder: str) -> MuonTrainer:
    """Trainer of a recipe from `without_files`, on this process's rank."""
    config = trainer_config(recipe, Run(folder=folder), world_size)
    config.tokenizer, config.dataloader = NoTokenizer(), NoData()
    gpu.has_meta_tensors = True
    trainer = config.build()
    gpu.has_meta_tensors = False
    trainer.is_first_step = False
    # Reporting a step reads the loss: TorchTitan's wait, at the end of logged steps.
    trainer.metrics_processor.should_log = lambda step: False
    gpu.size = tokens_for_each_rank(trainer)
    return trainer


def tokens_for_each_rank(trainer: MuonTrainer) -> int:
    """Tokens between each pair of ranks in expert parallelism with a balanced router, as the program reads them."""
    config, ranks = trainer.config, trainer.parallel_dims.ep
    layers = [layer.moe for layer in trainer.model_config.layers if getattr(layer, "moe", None) is not None]
    if not layers:
        return 0
    tokens = config.training.local_batch_size * config.training.seq_len // trainer.parallel_dims.tp
    return tokens * layers[0].router.top_k // ranks
