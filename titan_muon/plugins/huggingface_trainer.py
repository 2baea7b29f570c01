"""The optimizer of a Hugging Face Trainer, with the rates of its TrainingArguments."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..hybrid import Hybrid


def trainer_optimizer(model: nn.Module, arguments: Any, **options: Any) -> tuple[type[Hybrid], dict[str, Any]]:
    """The argument `optimizer_cls_and_kwargs` of a Trainer: a Hybrid of the model.

    Learning rate, weight decay, and AdamW's betas and eps come from `arguments`; `options` come before.

    Args:
        model: as given to the Trainer.
        arguments: `transformers.TrainingArguments`, or a subclass as `trl.SFTConfig`.
        options: other keywords of `Hybrid`.
    """
    adamw = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    rates = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    return Hybrid, {"model": model, **rates, **options, "adamw": {**adamw, **options.get("adamw", {})}}
