"""The loss on held-out documents. Every validation, under every layout of the ranks, reads the same sequences."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.tools.logging import logger

from titan_muon.titan.data.loader import PackedDataLoader


class HeldOutValidator(Validator):
    """TorchTitan's validator at every `freq` steps, on a number of sequences that no layout changes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        global_batch_size: int = -1
        """Sequences of an optimizer step over all ranks, which `steps` counts; -1 is one local batch on each rank."""

    dl_config: BaseDataLoader.Config

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(_with_an_end(config), **kwargs)
        self.last = self.stopped = False
        """Whether the step that ends is the run's last, and whether the run was asked to stop; set by the trainer."""
        self.check: Callable[[int], None] = lambda step: None
        """Raises FloatingPointError after a validation of a diverged model; set by the trainer."""
        at_once = self.dp_world_size * self.local_batch_size
        batch = at_once if config.global_batch_size == -1 else config.global_batch_size
        sequences = -1 if config.steps == -1 else config.steps * batch
        # TorchTitan's validator counts batches of each rank, whose size and number follow from the layout.
        self.config.steps = -(-sequences // at_once)
        if isinstance(self.dl_config, PackedDataLoader.Config):
            # A pipeline reads a batch in microbatches; one that the text ended in would be left out altogether.
            self.dl_config = replace(self.dl_config, sequences=sequences, multiple=at_once)
            self.config.steps = self._batches(sequences)

    def _batches(self, sequences: int) -> int:
        """Batches of each rank that `sequences` are read in, of which the held-out text may have fewer."""
        # Each validation builds a loader like this one; built here too, its errors come before training.
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        assert isinstance(loader, PackedDataLoader), "a configuration builds its loader"
        if sequences > loader.available:
            said = "validator.steps asks for %d sequences, but the held-out text has %d; validation uses those. "
            logger.warning(said + "Raise data.validation_fraction for more.", sequences, loader.available)
        assert loader.batches is not None, "a validation ends"
        return loader.batches

    def should_validate(self, step: int) -> bool:
        """Whether `step` is the last, or one of every `freq`-th of a run that was not asked to stop."""
        return self.last or (step % self.config.freq == 0 and not self.stopped)

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Report the loss on the held-out text, outside the training's time."""
        with self.metrics_processor.paused():
            super().validate(model_parts, step)
            self.check(step)


def _with_an_end(config: HeldOutValidator.Config) -> HeldOutValidator.Config:
    # TorchTitan warns that -1 may hang, since its loaders end apart; here -1 becomes a number, the same on every rank.
    ends = copy(config)
    ends.steps = max(config.steps, 1)
    return ends
