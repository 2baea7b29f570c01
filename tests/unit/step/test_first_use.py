"""Muon plans at its first use: earlier changes of parameters are free, and later ones need `rebuild`."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.shared import equal, muon_keywords
from titan_muon import Muon

SHAPES = {"layers.0.w": (8, 12), "layers.1.w": (12, 8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference"}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params.values():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(muon: torch.optim.Optimizer, params: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        muon.step()


def trained(steps: range) -> dict[str, nn.Parameter]:
    """Parameters after steps of an undisturbed Muon."""
    params = parameters()
    train(made(params), params, steps)
    return params


def made(params: dict[str, nn.Parameter]) -> Muon:
    return Muon(list(params.items()), **muon_keywords(**OPTIONS))


def test_construction_allocates_no_state_and_its_state_dict_loads() -> None:
    saving, muon = Muon(list(parameters().items()), lr=0.5), made(parameters())
    muon.load_state_dict(saving.state_dict())
    assert muon.param_groups[0]["lr"] == 0.5
    assert not muon.state
    assert muon.state_dict()["state"] == {}
    assert muon.build() is muon
    assert {tuple(state["momentum_buffer"].shape) for state in muon.state.values()} == set(SHAPES.values())


def of_others(device: str, params: dict[str, nn.Parameter]) -> Muon:
    """Like Accelerate's `prepare`: new parameters of the model replace the old parameters in groups."""
    muon = made({name: nn.Parameter(torch.ones_like(param, device=device)) for name, param in params.items()})
    muon.param_groups[0]["params"] = list(params.values())
    return muon


def of_a_part(is_built: bool, params: dict[str, nn.Parameter]) -> Muon:
    """A group is added."""
    (name, param), (other, second) = params.items()
    muon = made({name: param})
    if is_built:
        muon.build()
    muon.add_param_group({"params": [second], "param_names": [other]})
    return muon


FIRST = {"replaced": partial(of_others, "cpu"), "materialized": partial(of_others, "meta")}
FIRST |= {"added": partial(of_a_part, False), "added to a plan": partial(of_a_part, True)}


@pytest.mark.parametrize("change", FIRST)
def test_parameters_that_change_before_the_first_step_are_trained(change: str) -> None:
    params = parameters()
    train(FIRST[change](params), params, range(2))
    assert equal(params.values(), trained(range(2)).values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_a_copy_trains_as_the_original(copied: Callable[[Any], Any], rule: str) -> None:
    params = parameters()
    muon = Muon(list(params.items()), **muon_keywords(algorithm=rule, **OPTIONS))
    train(muon, params, range(2))
    others, other = copied((params, muon))
    train(muon, params, range(2, 4))
    assert not equal(params.values(), others.values())
    train(other, others, range(2, 4))
    assert equal(params.values(), others.values())


def test_a_parameter_thawed_or_frozen_after_the_first_step_is_an_error_until_rebuild() -> None:
    """Training after `rebuild`: rows of tests/parity."""
    params = parameters()
    late = params["layers.1.w"].requires_grad_(False)
    muon = made(params)
    train(muon, params, range(2))
    late.requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen when the optimizer was built .* rebuild\(\)"):
        train(muon, params, range(2, 3))
    muon.rebuild()
    train(muon, params, range(2, 3))
    late.requires_grad_(False)
    late.grad = None
    with pytest.raises(ValueError, match=r"for layers\.1\.w: .* frozen after Muon was built, call rebuild\(\)"):
        train(muon, params, range(3, 4))
    muon.rebuild()
    train(muon, params, range(3, 4))
    assert torch.equal(params["layers.0.w"], trained(range(4))["layers.0.w"])


def converted(muon: Muon, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """As model.to does."""
    for param in params.values():
        param.data = param.data.bfloat16()
    return params


def replaced(muon: Muon, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    others = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    muon.param_groups[0]["params"] = list(others.values())
    return others


@pytest.mark.parametrize(
    ("change", "error"),
    [(converted, r"layers.1.w: its dtype or its device changed"), (replaced, "another tensor took its place")],
)
def test_a_change_after_the_first_step_is_an_error_until_rebuild(change: Callable[..., Any], error: str) -> None:
    params = parameters()
    muon = made(params)
    train(muon, params, range(2))
    averages = [muon.state[param]["momentum_buffer"].clone() for param in params.values()]
    params = change(muon, params)
    with pytest.raises(ValueError, match=rf"{error} .* rebuild\(\)"):
        train(muon, params, range(2, 3))
    muon.rebuild()
    assert set(muon.state) == set(params.values())
    assert equal(averages, [muon.state[param]["momentum_buffer"] for param in params.values()])
    train(muon, params, range(2, 4))


def test_rebuild_refuses_a_different_shape_and_keeps_the_state() -> None:
    params = parameters()
    muon = made(params)
    train(muon, params, range(1))
    kept = dict(muon.state)
    muon.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"layers\.0\.w: resharded .* its momentum does not fit"):
        muon.rebuild()
    assert dict(muon.state) == kept


@pytest.mark.parametrize("keep_buffers", [True, False])
@pytest.mark.parametrize("place", ["trained_params", "checked_plan", "with_matrix_states", "engine_of"])
def test_a_refused_rebuild_changes_nothing(place: str, keep_buffers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thawed parameter adds momentum, state and a count of steps before some refusals."""
    options = {**OPTIONS, "algorithm": "normuon", "keep_buffers": keep_buffers}
    params, reference = parameters(), parameters()
    for tensors in (params, reference):
        tensors["layers.1.w"].requires_grad_(False)
    late = {"params": [torch.nn.Parameter(torch.ones(4, 6).bfloat16(), requires_grad=False)], "param_names": ["late"]}
    muon = Muon([{"params": list(params.items())}, late], **muon_keywords(**options))
    undisturbed = Muon(list(reference.items()), **muon_keywords(**options))
    train(muon, params, range(2))
    params["layers.1.w"].requires_grad_(True)
    late["params"][0].requires_grad_(True)
    tensors = {param: dict(state) for param, state in muon.state.items()}
    keys, chosen, engine = [{*group} for group in muon.param_groups], muon._options, muon.engine
    with monkeypatch.context() as patch:
        patch.setattr(f"titan_muon.muon.{place}", Mock(side_effect=MemoryError("no memory")))
        with pytest.raises(MemoryError, match="no memory"):
            muon.rebuild()
    assert muon.state == tensors
    assert [{*group} for group in muon.param_groups] == keys
    assert (muon._options, muon.engine) == (chosen, engine)
    params["layers.1.w"].requires_grad_(False)
    late["params"][0].requires_grad_(False)
    train(muon, params, range(2, 4))
    train(undisturbed, reference, range(4))
    assert equal(params.values(), reference.values())


def test_keys_of_other_libraries_pass_through_untouched() -> None:
    """Keys of timm, mmengine, fairseq, torch's schedulers and optimizers, and of other Muons."""
    keys = {"lr_scale": 0.65, "lr_mult": 0.5, "max_momentum": 0.95, "differentiable": False, "use_muon": True}
    muon = Muon([{"params": [nn.Parameter(torch.ones(4, 6))], "param_names": ["w"], **keys}])
    muon.load_state_dict(copy.deepcopy(muon.state_dict()))
    assert muon.param_groups[0].items() >= (keys | {"adjust_lr_fn": "match_rms_adamw"}).items()


def test_a_refused_group_is_not_added() -> None:
    muon = Muon([("w", nn.Parameter(torch.ones(16, 16)))]).build()
    vector, matrix = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16, 16))
    for group in ({"params": [vector]}, {"params": [matrix], "ns_steps": 0}):
        with pytest.raises(ValueError, match=r"v: Muon takes matrices|ns_steps = 0"):
            muon.add_param_group({"param_names": ["v"], **group})
    muon.param_groups[0]["params"][0].grad = torch.ones(16, 16)
    muon.step()
    assert [group["param_names"] for group in muon.param_groups] == [["w"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_device_does_not_matter(dtype: torch.dtype) -> None:
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    train(made(params), params, range(2))
    muon = made(others)
    with torch.device("meta"):
        muon.build()
    for step in range(2):
        set_gradients(others, step)
        with torch.device("meta"):
            muon.step()
    assert equal(params.values(), others.values())
