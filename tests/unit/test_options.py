"""Options of Muon are declared once, and everything derived from the declaration agrees."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch.nn import Parameter

from tests.shared import muon_keywords
from titan_muon import Muon, options
from titan_muon.options import (
    EXPERT,
    HYPERPARAMETERS,
    KEYWORDS,
    SHARED,
    Expert,
    Hyperparameters,
    Machine,
    MuonOptions,
    OptionError,
    StepOptions,
    check,
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


def test_a_declaration_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning makes options over and over."""
    MuonOptions()
    monkeypatch.delattr(options, "get_type_hints")
    assert MuonOptions(lr=0.5).lr == 0.5
    with pytest.raises(OptionError):
        MuonOptions(lr=-1.0)


@pytest.mark.parametrize("table", [Expert, Hyperparameters, StepOptions, MuonOptions, Machine])
def test_every_number_has_a_range(table: type) -> None:
    ranged = {name for name, *_ in constraints(table)}
    numbers = {item.name for item in fields(table) if type(getattr(table(), item.name)) in (int, float)}
    assert numbers <= ranged


def test_absent_options_are_not_checked() -> None:
    check(Hyperparameters, {"momentum": 0.9})
    with pytest.raises(OptionError, match="momentum"):
        check(Hyperparameters, {"momentum": -0.9})
