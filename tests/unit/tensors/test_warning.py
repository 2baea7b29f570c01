"""A warning shows the user's line, however deep in the package it is made."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from titan_muon import Expert, Muon, clip_grad_norm_


def thin() -> Muon:
    return Muon([("w", nn.Parameter(torch.ones(4, 64)))], expert=Expert(on_bad_gradient="skip_step"))


def not_finite(*, clip: bool) -> None:
    muon = thin()
    (param,) = muon.param_groups[0]["params"]
    param.grad = torch.full((4, 64), torch.nan)
    if clip:
        clip_grad_norm_([param], 1.0, optimizer=muon)
    muon.step()
    muon.step()
    muon.check_last_step()


def load_without_keys() -> None:
    state = thin().build().state_dict()
    for group in state["param_groups"]:
        del group["ns_steps"]
    thin().load_state_dict(state)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (thin, "a side under 16"),
        (lambda: not_finite(clip=False), "the step changed nothing on any rank"),
        (lambda: not_finite(clip=True), "the norm of the gradients was not finite"),
        (load_without_keys, "the present values stay"),
    ],
    ids=["construction", "gradient", "norm", "load"],
)
def test_a_warning_has_the_line_of_the_users_call(act: Callable[[], object], text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    places = {warning.filename for warning in caught if text in str(warning.message)}
    assert places == {__file__}
