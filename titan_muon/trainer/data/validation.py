"""Loss on held-out documents: the same sequences in every validation."""

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.components.validate import Validator

from titan_muon.trainer.data.loader import PackedDataLoader

logger = logging.getLogger(__name__)


class HeldOutValidator(Validator):
    """TorchTitan's validator on the same sequences for all layouts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        global_batch_size: int = -1
        """Sequences per optimizer step over all ranks, the unit of `steps`; -1: a local batch per rank."""
        is_stopping: Callable[[], bool] = lambda: False
        """Whether a stop was requested, so that no other validation begins."""

    dl_config: Any

    def __init__(self, config: Config, **kwargs: Any) -> None:
        # TorchTitan warns of -1. Here -1 becomes the same number on all ranks.
        limited = copy(config)
        limited.steps = max(config.steps, 1)
        super().__init__(limited, **kwargs)
        at_once = self.dp_world_size * self.local_batch_size
        batch = at_once if config.global_batch_size == -1 else config.global_batch_size
        sequences = -1 if config.steps == -1 else config.steps * batch
        self.config.steps = -(-sequences // at_once)
        if isinstance(self.dl_config, PackedDataLoader.Config):
            # A pipeline reads microbatches and would drop an incomplete last batch.
            self.dl_config = replace(self.dl_config, sequences=sequences, multiple=at_once)
            self.config.steps = self._batches(sequences)

    def _batches(self, sequences: int) -> int:
        # Before training, so that errors come early.
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        assert isinstance(loader, PackedDataLoader), "a configuration builds its loader"
        if sequences > loader.available:
            message = "validator.steps needs %d sequences, and validation uses all %d of the held-out text. "
            logger.warning(message + "Raise data.validation_fraction for more.", sequences, loader.available)
        assert loader.batches is not None, "a validation ends"
        return loader.batches

    def should_validate(self, step: int) -> bool:
        last = step == self.metrics_processor.config.total_steps
        return last or (step % self.config.freq == 0 and not self.config.is_stopping())
