"""The loss on held-out documents. Its batches are the same at every validation and under every rank layout."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.validate import Validator

from titan_muon.titan.data.loader import validation_steps


class HeldOutValidator(Validator):
    """TorchTitan's validator at every `freq` steps, on as many batches as the held-out text has."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.last = self.stopped = False
        """Whether the step that ends is the run's last, and whether the run was asked to stop; set by the trainer."""
        # Each validation builds a loader like this one; built here too, its errors come before training.
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        self.config.steps = validation_steps(loader, config.steps)

    def should_validate(self, step: int) -> bool:
        """Whether `step` is the last, or one of every `freq`-th of a run that was not asked to stop."""
        return self.last or (step % self.config.freq == 0 and not self.stopped)

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Report the loss on the held-out text, outside the training's time."""
        with self.metrics_processor.paused():
            super().validate(model_parts, step)
