"""The rates of TrainingArguments reach both optimizers, unless options say otherwise."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from titan_muon import trainer_optimizer

ARGUMENTS = SimpleNamespace(learning_rate=3e-3, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)


def groups(**options: Any) -> dict[str, dict[str, Any]]:
    """A group of each optimizer that decays, as the Trainer makes the optimizer."""
    kind, keywords = trainer_optimizer(nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32)), ARGUMENTS, **options)
    made = kind(keywords.pop("model"), **keywords)
    return {group["optimizer"]: group for group in made.param_groups if group["weight_decay"] != 0}


def test_rates_betas_and_decay_are_those_of_the_arguments() -> None:
    both = groups()
    assert {(group["lr"], group["weight_decay"]) for group in both.values()} == {(3e-3, 0.2)}
    assert (both["adamw"]["betas"], both["adamw"]["eps"]) == ((0.8, 0.9), 1e-6)


def test_options_come_before_the_arguments() -> None:
    both = groups(lr=1e-3, muon={"momentum": 0.9}, adamw={"eps": 1e-7})
    assert both["muon"]["lr"] == both["adamw"]["lr"] == 1e-3
    assert both["muon"]["momentum"] == 0.9
    assert (both["adamw"]["betas"], both["adamw"]["eps"]) == ((0.8, 0.9), 1e-7)
