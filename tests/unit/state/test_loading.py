"""Steps continue with a loaded state, for any tensors of the state dict."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_muon import Expert, Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.process_groups import StateMesh, fake_world


def trained(rule: str) -> tuple[nn.Parameter, Muon]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 8))
    return param, Muon([("w", param)], algorithm=rule, expert=Expert(orthogonalize="reference"))


def step(param: nn.Parameter, muon: Muon, seed: int) -> None:
    param.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    muon.step()


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_tensors_put_into_a_live_state_dict_are_loaded(rule: str) -> None:
    """A state dict shares the inner dicts with the optimizer, so both have the tensor before the load."""
    param, muon = trained(rule)
    step(param, muon, 1)
    weights, saved = param.detach().clone(), copy.deepcopy(muon.state_dict())
    step(param, muon, 2)
    expected = param.detach().clone()
    live = muon.state_dict()
    for name, value in saved["state"][0].items():
        live["state"][0][name] = value
    with torch.no_grad():
        param.copy_(weights)
    muon.load_state_dict(live)
    step(param, muon, 2)
    assert torch.equal(param, expected)


def test_a_state_dict_without_a_newer_option_is_loaded() -> None:
    """Each new option would otherwise make all older state dicts unreadable. The present value of the option stays."""
    param, muon = trained("muon")
    step(param, muon, 1)
    saved = copy.deepcopy(muon.state_dict())
    del saved["param_groups"][0]["ns_steps"]
    other = nn.Parameter(param.detach().clone())
    resumed = Muon([("w", other)], ns_steps=3, expert=Expert(orthogonalize="reference"))
    with pytest.warns(UserWarning, match="the state dict has no ns_steps: the present values stay"):
        resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["ns_steps"] == 3
    assert torch.equal(resumed.state[other]["momentum_buffer"], muon.state[param]["momentum_buffer"])
    step(other, resumed, 2)


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
