"""The loss on held-out documents, measured so that the training around it does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator

from titan_muon.titan.data import bytes_per_token, validation_steps
from titan_muon.titan.metrics import Metrics

ROUTER_STATISTIC = "tokens_per_expert_E"


class HeldOutValidator(Validator):
    """TorchTitan's validator at every `freq` steps, without its traces in the training."""

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
        with self.metrics_processor.paused(), router_statistics_kept(model_parts):
            super().validate(model_parts, step)


@contextmanager
def router_statistics_kept(model_parts: list[nn.Module]) -> Iterator[None]:
    """Restore afterwards what MoE routers counted so far.

    Every forward adds to the counts, in evaluation too, and the next optimizer step moves the experts' biases by them.
    """
    buffers = [b for part in model_parts for name, b in part.named_buffers() if name.endswith(ROUTER_STATISTIC)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in zip(buffers, before, strict=True):
                buffer.copy_(kept)
