"""Options of Muon are declared once, everything derived from the declaration agrees, and exported names load."""

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import titan_muon
from tests.shared import muon_keywords
from titan_muon import Muon, Split, trainer_optimizer
from titan_muon.adamw import AdamW
from titan_muon.options import (
    EXPERT,
    HYPERPARAMETERS,
    KEYWORDS,
    SHARED,
    Expert,
    Hyperparameters,
    Machine,
    MuonOptions,
    StepOptions,
    constraints,
)


def test_the_signature_of_muon_has_every_option_and_default() -> None:
    """An editor reads the signature; the declaration is `MuonOptions`."""
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(Muon).parameters.items()
        if name not in ("self", "params", "process_group", "unknown")
    }
    assert shown.pop("expert") == Expert()
    declared = [item.name for item in fields(MuonOptions) if item.name not in EXPERT]
    assert shown == {name: getattr(MuonOptions(), name) for name in declared}
    assert {*shown, "expert"} == {*KEYWORDS}


def test_muon_stores_every_argument() -> None:
    options = MuonOptions(
        lr=0.5, ns_steps=3, exchange="all_gather", on_bad_gradient="skip_step", machine=Machine(ranks_per_node=2)
    )
    values = {item.name: getattr(options, item.name) for item in fields(options)}
    muon = Muon([("w", Parameter(torch.zeros(4, 4)))], **muon_keywords(**values))
    assert muon._options == options
    assert {name: muon.param_groups[0][name] for name in HYPERPARAMETERS} == {
        name: values[name] for name in HYPERPARAMETERS
    }


def test_every_option_belongs_to_a_group_or_to_the_whole_optimizer() -> None:
    assert set(HYPERPARAMETERS) | set(SHARED) == {item.name for item in fields(MuonOptions)}
    assert not set(HYPERPARAMETERS) & set(SHARED)


@pytest.mark.parametrize("table", [Expert, Hyperparameters, StepOptions, MuonOptions, Machine])
def test_every_number_has_a_range(table: type) -> None:
    ranged = {name for name, *_ in constraints(table)}
    numbers = {item.name for item in fields(table) if type(getattr(table(), item.name)) in (int, float)}
    assert numbers <= ranged


def test_public_names_are_listed_and_load() -> None:
    assert set(titan_muon.__all__) <= set(dir(titan_muon))
    assert all(getattr(titan_muon, name) is not None for name in titan_muon.__all__)
    assert titan_muon.Split is Split


def test_adamw_takes_a_state_that_another_library_began() -> None:
    parameter = nn.Parameter(torch.ones(3))
    adamw = AdamW([("bias", parameter)])
    adamw.state[parameter]["z"] = parameter.detach().clone()
    parameter.grad = torch.ones(3)
    adamw.step()
    assert {"z", "exp_avg", "exp_avg_sq", "step"} <= adamw.state[parameter].keys()


ARGUMENTS = SimpleNamespace(learning_rate=3e-3, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)


def groups(**options: Any) -> dict[str, dict[str, Any]]:
    """A group of each optimizer that decays, as the Trainer makes the optimizer."""
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    kind, keywords = trainer_optimizer(model, ARGUMENTS, **options)
    made = kind(keywords.pop("model"), **keywords)
    return {group["optimizer"]: group for group in made.param_groups if group["weight_decay"] != 0}


def test_rates_betas_and_decay_are_those_of_the_arguments_unless_options_say_otherwise() -> None:
    both = groups()
    assert {(group["lr"], group["weight_decay"]) for group in both.values()} == {(3e-3, 0.2)}
    assert (both["adamw"]["betas"], both["adamw"]["eps"]) == ((0.8, 0.9), 1e-6)
    both = groups(lr=1e-3, muon={"momentum": 0.9}, adamw={"eps": 1e-7})
    assert both["muon"]["lr"] == both["adamw"]["lr"] == 1e-3
    assert both["muon"]["momentum"] == 0.9
    assert (both["adamw"]["betas"], both["adamw"]["eps"]) == ((0.8, 0.9), 1e-7)
