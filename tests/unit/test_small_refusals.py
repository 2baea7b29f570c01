"""Small promises of the face: exported names, refusals with a remedy, and states that another library began."""

import torch
from torch import nn

import titan_muon
from titan_muon import Split
from titan_muon.adamw import AdamW
from titan_muon.engine.step.muon import MuonAlgorithm
from titan_muon.kernels.fused import has_kernels
from titan_muon.options import MuonOptions


def test_public_names_are_listed_and_load() -> None:
    assert set(titan_muon.__all__) <= set(dir(titan_muon))
    assert all(getattr(titan_muon, name) is not None for name in titan_muon.__all__)
    assert titan_muon.Split is Split


class OwnSum(MuonAlgorithm):
    def add(self, params, updates, scratch, *, call):  # type: ignore[no-untyped-def]
        super().add(params, updates, scratch, call=call)


def test_an_algorithm_with_its_own_sum_has_no_kernels() -> None:
    assert has_kernels(MuonAlgorithm(MuonOptions()))
    assert not has_kernels(OwnSum(MuonOptions()))


def test_adamw_takes_a_state_that_another_library_began() -> None:
    parameter = nn.Parameter(torch.ones(3))
    adamw = AdamW([("bias", parameter)])
    adamw.state[parameter]["z"] = parameter.detach().clone()
    parameter.grad = torch.ones(3)
    adamw.step()
    assert {"z", "exp_avg", "exp_avg_sq", "step"} <= adamw.state[parameter].keys()
