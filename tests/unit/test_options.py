"""Options of Muon are declared once and agree, exported names load, and optimizers are found by name in registries."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import titan_muon

# Registers the optimizers of this package.
import titan_muon.trainer.assign.container
import titan_muon.trainer.model.parallelize
from tests.shared import muon_keywords
from titan_muon import Muon, Split, trainer_optimizer
from titan_muon.adamw import AdamW
from titan_muon.engine.orthogonalize import COEFFICIENTS
from titan_muon.options import (
    EXPERT,
    HYPERPARAMETERS,
    KEYWORDS,
    SHARED,
    CoefficientSet,
    Expert,
    Hyperparameters,
    Machine,
    MuonOptions,
    StepOptions,
    constraints,
)
from titan_muon.registry import Registry, algorithms, optimizers, placements, shared_options


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


# Optimizers by name: built in, added by packages, and clear errors for unknown names


def test_a_registered_value_is_found_by_name_and_a_similar_name_is_suggested() -> None:
    registry: Registry[int] = Registry("some.key", "titan_muon.tests")
    for value, name in enumerate(("zero", "one", "three")):
        registry.register(name, value)
    with pytest.raises(ValueError, match=r"some\.key: 'one' is registered already; choose another name"):
        registry.register("one", 2)
    assert (registry.get("one"), registry.get("zero")) == (1, 0)
    hint = "some.key = 'thre' is unknown; did you mean 'three'? choose from: one, three, zero"
    with pytest.raises(ValueError, match=re.escape(hint)):
        registry.get("thre")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with an optimizer, as installed by pip."""
    (tmp_path / "their_package.py").write_text(
        "import torch\nfrom titan_muon.registry import OptimizerEntry\n"
        "entry = OptimizerEntry(lambda groups, **options: torch.optim.SGD(groups, **options), ('foreach',))\n"
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[titan_muon.optimizers]\ntheir_sgd = their_package:entry\nbroken = their_package:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("their_package", None)


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_optimizer_by_name() -> None:
    """The package is imported at the first use of its name."""
    registry: Registry[Any] = Registry("optimizer", "titan_muon.optimizers")
    registry.register("mine", 1)
    assert registry.get("mine") == 1
    assert "their_sgd" in registry.names()
    assert "their_package" not in sys.modules
    built = registry.get("their_sgd").build([{"params": [torch.nn.Parameter(torch.ones(2))]}], lr=0.5)
    assert isinstance(built, torch.optim.SGD)
    assert registry.get("their_sgd").shared == ("foreach",)
    with pytest.raises(AttributeError, match="nothing"):
        registry.get("broken")


def test_shared_options_belong_to_the_whole_optimizer() -> None:
    options = {"lr": 0.1, "expert": Expert(exchange="all_gather"), "foreach": True}
    assert shared_options("muon", options) == {"expert": Expert(exchange="all_gather")}
    assert shared_options("adamw", options) == {"foreach": True}


def test_a_recipe_is_checked_against_every_name_of_this_package_before_the_name_is_registered() -> None:
    assert {*optimizers.own} == {"muon", "adamw"} <= set(optimizers._values)
    assert {*algorithms.own} == set(algorithms._values)
    assert {*placements.own, "shard0"} == set(placements._values)
    assert get_args(CoefficientSet) == tuple(COEFFICIENTS)
