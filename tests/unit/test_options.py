"""Options of Muon are declared once, and everything derived from the declaration agrees."""

import inspect
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.shared import muon_keywords
from titan_muon import Hybrid, Muon, Owners, options, own
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


@pytest.mark.parametrize(
    ("keyword", "named"),
    [
        ("learning_rate", "Did you mean lr"),
        ("momentun", "Did you mean momentum"),
        ("exchange", r"Did you mean expert=Expert(exchange=...)?"),
        ("exchang", r"Did you mean expert=Expert(exchange=...)?"),
        ("missing_grad", r"Did you mean expert=Expert(on_bad_gradient=...)?"),
        ("zzz", "It takes"),
    ],
)
def test_the_error_of_an_unknown_keyword_lists_the_options(keyword: str, named: str) -> None:
    unknown: dict[str, Any] = {keyword: 1}
    with pytest.raises(TypeError, match=f"no keyword {keyword}.*weight_decay") as error:
        Muon([("w", Parameter(torch.zeros(4, 4)))], **unknown)
    assert named in str(error.value)


def test_a_text_for_a_number_is_refused_by_name() -> None:
    text: dict[str, Any] = {"lr": "1e-3"}
    with pytest.raises(OptionError, match=r"^lr = '1e-3' is not accepted"):
        Muon([("w", Parameter(torch.zeros(4, 4)))], **text)


def test_an_empty_state_dict_is_refused_with_the_missing_keys() -> None:
    muon = Muon([("w", Parameter(torch.zeros(4, 4)))])
    with pytest.raises(ValueError, match="no state and no param_groups"):
        muon.load_state_dict({})


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


@pytest.mark.parametrize("expert", [{"exchange": "all_gather"}, None])
def test_another_thing_than_an_expert_is_refused(expert: Any) -> None:
    with pytest.raises(OptionError, match=r"^expert = .* write expert=titan_muon\.Expert"):
        Muon([("w", Parameter(torch.zeros(4, 4)))], expert=expert)


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


WRONG = [
    ("lr", -1e-3, "it takes 0 or more"),
    ("lr", math.nan, "it takes 0 or more"),
    ("momentum", 1.0, "it takes a number from 0 to less than 1"),
    ("ns_steps", 0, "it takes 1 or more"),
    ("ns_coefficients", (), "pion_promotion, or a list that is not empty"),
    ("eps", 0.0, "it takes more than 0"),
    ("adjust_lr_fn", "adam", "it takes match_rms_adamw, original, spectral_unclamped, or a number above 0"),
    ("exchange", "all_to_al", "is not one of all_to_all, all_gather, all_gather_reduce_scatter"),
    ("on_bad_gradient", None, "is not one of error, skip_missing, skip_step"),
    ("on_bad_gradient", "skip", "was removed, because undoing parts of a step"),
    ("on_bad_gradient", "skip_nonfinite", "was removed, because undoing parts of a step"),
    ("ns_kernel", "quack", "was removed: no run measured it; set 'auto' or 'triton'"),
    ("ns_coefficients", "aol", "was removed: it scaled rows and no run gained by it; set another set"),
    ("replicas", "both", "is not one of auto, split, redundant"),
    ("algorithm", None, "it takes a name, or a list of different names"),
    ("algorithm", {"muon"}, "it takes a name, or a list of different names"),
    ("algorithm", ["muon", "muon"], "it takes a name, or a list of different names"),
    ("lr", None, "it takes 0 or more"),
]


@pytest.mark.parametrize(("option", "value", "accepted"), WRONG)
def test_a_wrong_value_is_refused_by_the_users_option_name(option: str, value: Any, accepted: str) -> None:
    with pytest.raises(OptionError, match=rf"^{option} = ") as caught:
        Muon([("w", Parameter(torch.zeros(4, 4)))], **muon_keywords(**{option: value}))
    assert accepted in str(caught.value)
    assert caught.value.option == option


@pytest.mark.parametrize("group", [{"lr": -1.0}, {"adjust_lr_fn": "adam"}, {"algorithm": None}])
def test_the_value_of_a_group_is_checked(group: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"^{next(iter(group))} = "):
        Muon([{"params": [Parameter(torch.zeros(4, 4))], "param_names": ["w"], **group}])


def test_absent_options_are_not_checked() -> None:
    check(Hyperparameters, {"momentum": 0.9})
    with pytest.raises(OptionError, match="momentum"):
        check(Hyperparameters, {"momentum": -0.9})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            lambda: Muon([("w", Parameter(torch.zeros(4, 4)))], overlap="backward"),
            "overlap = 'backward' was removed: .*set 'forward'",
        ),
        (lambda: Expert(split_over=2), "split_over was removed: .*leave it out"),  # type: ignore[call-arg]
        (lambda: Hybrid(nn.Linear(4, 4), tp_mode="owner"), "tp_mode was removed: .*leave it out"),  # type: ignore[arg-type]
        (lambda: Expert(whole_freq=5), "whole_freq was removed: .*leave it out"),  # type: ignore[call-arg]
        (lambda: own(nn.Linear(4, 4), tp_pieces="whole"), "tp_pieces was removed: .*leave it out"),  # type: ignore[call-arg]
        (lambda: Owners(nn.Linear(4, 4), tp_pieces="peers"), "tp_pieces was removed: .*leave it out"),  # type: ignore[call-arg]
        (lambda: Muon([], block_lr_scale=0.5), "block_lr_scale was removed with whole_freq"),  # type: ignore[arg-type]
    ],
)
def test_what_was_removed_is_refused_with_what_to_do_instead(value: Any, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        value()
