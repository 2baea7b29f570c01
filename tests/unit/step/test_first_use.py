"""Muon plans at its first use, and later changes need `rebuild`; state dicts, also of other optimizers, in place."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.shared import equal, muon_keywords
from titan_muon import Expert, Hybrid, Muon, as_torch, converted
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.process_groups import StateMesh
from titan_muon.forecast.fake_world import fake_world

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


def in_bfloat16(muon: Muon, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
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
    [(in_bfloat16, r"layers.1.w: its dtype or its device changed"), (replaced, "another tensor took its place")],
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


# State dicts: of other Muon optimizers and for them, and loads in place


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
    with pytest.warns(UserWarning, match="the state dict has no ns_steps: the present values stay") as warned:
        resumed.load_state_dict(saved)
    assert warned[0].filename == __file__
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
