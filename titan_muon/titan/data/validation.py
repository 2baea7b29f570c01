"""The loss on held-out documents. Its batches are the same at every validation and under every rank layout."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator

from titan_muon.titan.data.loader import bytes_per_token, validation_steps
from titan_muon.titan.run.metrics import Metrics


class HeldOutValidator(Validator):
    """TorchTitan's validator at every `freq` steps, kept out of the training's tokens and time."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def __init__(self, config: Config, *, metrics_processor: Metrics, **kwargs: Any) -> None:
        super().__init__(config, metrics_processor=metrics_processor, **kwargs)
        self.config.steps = validation_steps(self._build_loader(), config.steps)
        metrics_processor.bytes_per_token = bytes_per_token(config.dataloader, self.tokenizer)

    def _build_loader(self) -> BaseDataLoader:
        """A loader like the one of every validation, built once up front so that its errors come before training."""
        return self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )

    def should_validate(self, step: int) -> bool:
        """Whether `step` is one of every `freq`-th; the trainer adds the last one."""
        return step % self.config.freq == 0

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Measure and report the loss. Every rank calls it."""
        with self.metrics_processor.paused():
            super().validate(model_parts, step)
