"""State dicts: of other Muon optimizers and for them, and loads in place."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.shared import equal
from tests.unit.step.test_first_use import SHAPES, parameters, set_gradients, train
from titan_muon import Expert, Hybrid, Muon, as_torch, converted
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.process_groups import StateMesh
from titan_muon.forecast.fake_world import fake_world


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
def test_a_checkpoint_goes_to_torchs_muon_and_back_bit_for_bit(adjust: str | None) -> None:
    """With torch's spellings of the options, and without names of parameters."""
    params, others = parameters(), parameters()
    keywords: dict[str, Any] = {"lr": 0.02, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": adjust, "ns_steps": 4}
    try:
        theirs = torch.optim.Muon(params.values(), **keywords)
    except ValueError:
        pytest.skip(f"torch.optim.Muon has {adjust} from PyTorch 2.15 on")
    train(theirs, params, range(2))
    ours = Muon(others.values(), expert=Expert(orthogonalize="reference"), **keywords)
    train(ours, others, range(2))
    assert ours.param_groups[0]["param_names"] == ["0.0", "0.1"]
    for loading, state in ((ours, theirs.state_dict()), (theirs, as_torch(ours.state_dict()))):
        assert equal(params.values(), others.values())
        loading.load_state_dict(copy.deepcopy(state))
        train(theirs, params, range(2, 4))
        train(ours, others, range(2, 4))
    assert equal(params.values(), others.values())


def test_the_algorithm_of_a_group_is_muon_for_torch() -> None:
    groups = [{"params": [pair], "algorithm": "muon"} for pair in parameters().items()]
    assert all("algorithm" not in group for group in as_torch(Muon(groups).state_dict())["param_groups"])


@pytest.mark.parametrize(("saved", "loaded"), [("spectral", "spectral_unclamped"), ("original", "original")])
@pytest.mark.parametrize("optimizer", ["muon", "hybrid"])
def test_a_state_dict_with_lr_scale_loads_as_adjust_lr_fn(saved: str, loaded: str, optimizer: str) -> None:
    """As saved before `adjust_lr_fn` was the option's name."""
    params = parameters()
    made = Hybrid(nn.ParameterDict({"hidden": params["layers.0.w"]})) if optimizer == "hybrid" else Muon(params.items())
    state = copy.deepcopy(made.state_dict())
    del state["param_groups"][0]["adjust_lr_fn"]
    state["param_groups"][0]["lr_scale"] = saved
    made.load_state_dict(state)
    assert made.param_groups[0]["adjust_lr_fn"] == loaded
    assert "lr_scale" not in made.param_groups[0]


def averages_of(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """torch's momentum after the gradients of three steps."""
    averages = {name: torch.zeros_like(param) for name, param in params.items()}
    for step in range(3):
        set_gradients(params, step)
        for name, param in params.items():
            averages[name].lerp_(param.grad, 0.1)
    return averages


def saved_by(source: str, averages: dict[str, Tensor]) -> dict[str, Any]:
    """A state dict of another Muon with an AdamW. In dion and dmuon momentum is the sum m <- mu m + g."""
    muon: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    adamw: dict[str, Any] = {"params": [2], "lr": 0.5, "betas": (0.9, 0.99)}
    if source == "dmuon":
        momentum = {name: {"momentum_buffer": 10 * average} for name, average in averages.items()}
        return {"fsdp": {}, "dedicated": momentum, "param_groups": [muon, adamw]}
    if source == "dion":
        dion = {"lr": 0.02, "mu": 0.9, "weight_decay": 0.1, "nesterov": True, "adjust_lr": "rms_norm", "epsilon": 1e-8}
        groups = [{**dion, "params": [0, 1], "algorithm": "muon"}, {**dion, **adamw, "algorithm": "adamw"}]
        return {"state": {i: {"momentum": 10 * a} for i, a in enumerate(averages.values())}, "param_groups": groups}
    state = {index: {"momentum_buffer": average} for index, average in enumerate(averages.values())}
    if source == "torchtitan":
        (group,) = torch.optim.Muon(parameters().values(), **muon).state_dict()["param_groups"]
        return {"state": state, "param_groups": [group]}
    state[2] = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(3)}
    groups = [{**muon, "params": [0, 1], "use_muon": True}, {**adamw, "use_muon": False}]
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize(
    ("source", "adjust"),
    [("dion", "match_rms_adamw"), ("dmuon", "match_rms_adamw"), ("torchtitan", None), ("keller_jordan", "original")],
)
def test_the_momentum_of_another_muon_is_converted_to_an_average(source: Any, adjust: str | None) -> None:
    params = parameters()
    averages, ours = averages_of(params), Muon(list(params.items()))
    ours.load_state_dict(converted(saved_by(source, averages), source, ns_coefficients="polar_express_cushion"))
    for name, average in averages.items():
        torch.testing.assert_close(ours.state[params[name]]["momentum_buffer"], average)
    group = ours.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.02, 0.9, adjust)
    assert group["ns_coefficients"] == "polar_express_cushion"


def test_names_do_not_depend_on_wrappers() -> None:
    """As of a model under DDP, activation checkpointing, or torch.compile."""
    params = parameters()
    saving = Muon([(f"module._orig_mod.{name}", param) for name, param in params.items()])
    train(saving, params, range(1))
    loading = Muon(list(parameters().items()))
    assert loading.param_groups[0]["param_names"] == list(SHAPES)
    loading.load_state_dict(saving.state_dict())


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_tensors_put_into_a_live_state_dict_are_loaded(rule: str) -> None:
    """A state dict shares the inner dicts with the optimizer, so both have the tensor before the load."""
    params = parameters()
    muon = Muon(params.items(), algorithm=rule, expert=Expert(orthogonalize="reference"))
    train(muon, params, range(1))
    before, saved = copy.deepcopy(params), copy.deepcopy(muon.state_dict())
    train(muon, params, range(1, 2))
    expected, live = copy.deepcopy(params), muon.state_dict()
    for key, state in saved["state"].items():
        live["state"][key].update(state)
    for name, param in params.items():
        param.data.copy_(before[name])
    muon.load_state_dict(live)
    train(muon, params, range(1, 2))
    assert equal(params.values(), expected.values())


def test_a_state_dict_without_a_newer_option_is_loaded() -> None:
    """Each new option would otherwise make all older state dicts unreadable. The present value of the option stays."""
    params, others = parameters(), parameters()
    muon, resumed = Muon(params.items()), Muon(others.items(), ns_steps=3)
    train(muon, params, range(1))
    saved = copy.deepcopy(muon.state_dict())
    del saved["param_groups"][0]["ns_steps"]
    with pytest.warns(UserWarning, match="the state dict has no ns_steps: the present values stay"):
        resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["ns_steps"] == 3
    saved = [muon.state[param]["momentum_buffer"] for param in params.values()]
    assert equal(saved, [resumed.state[param]["momentum_buffer"] for param in others.values()])
    train(resumed, others, range(1, 2))


def test_adamws_state_of_another_placement_is_refused() -> None:
    """A shard of another rank may have the same shape."""
    with fake_world(2):
        mesh, shard = init_device_mesh("cpu", (2,)), torch.ones(4, 8)
        params = [
            nn.Parameter(DTensor.from_local(shard.clone(), mesh, [kind])) for kind in (Shard(0), Replicate(), Shard(1))
        ]
        saving, same, *others = (AdamW([("w", param)]) for param in (params[0], *params))
        params[0].grad = torch.ones_like(params[0])
        saving.step()
        for param, adamw in zip(params[1:], others, strict=True):
            with pytest.raises(ValueError, match=r"the state dict has no exp_avg with this optimizer's shape"):
                adamw.load_state_dict(saving.state_dict())
            assert not adamw.state.get(param, {}).get("exp_avg", shard * 0).any()
        same.load_state_dict(saving.state_dict())


def test_pickling_a_momentum_of_a_single_owner_warns() -> None:
    """As in a script with a save on one rank under DDP, with state = "owner"."""
    with pytest.warns(UserWarning, match=r"the part of this rank alone\. Save with torch\.distributed\.checkpoint"):
        pickle.dumps(StateMesh.__new__(StateMesh))
