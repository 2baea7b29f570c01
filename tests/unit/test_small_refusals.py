"""Small promises of the face: exported names, refusals with a remedy, and states that another library began."""

import pytest
import torch
from torch import nn

import titan_muon
from tests.shared import message
from titan_muon import Muon, Split
from titan_muon.adamw import AdamW
from titan_muon.engine.step.muon import MuonAlgorithm
from titan_muon.kernels.fused import has_kernels
from titan_muon.options import MuonOptions


def weight() -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.ones(4, 6)))]


def test_public_names_are_listed_and_load() -> None:
    assert set(titan_muon.__all__) <= set(dir(titan_muon))
    assert all(getattr(titan_muon, name) is not None for name in titan_muon.__all__)
    assert titan_muon.Split is Split


@pytest.mark.parametrize("split", [[{"match": "*"}], {"match": "*"}, Split(match="*", dims="f d -> | f d")], ids=str)
def test_a_split_of_another_type_is_refused_with_a_remedy(split: object) -> None:
    text = message(lambda: Muon(weight(), split=split))  # type: ignore[arg-type]
    assert text.startswith("split")
    assert "split=[titan_muon.Split(" in text


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


def test_a_state_of_two_algorithms_is_refused_with_a_remedy() -> None:
    text = message(lambda: Muon(weight(), algorithm=("normuon", "adamuon")))
    assert "two of these keep a state of the same name; take one of them" in text


def test_muonh_names_a_remedy_for_narrow_weights() -> None:
    narrow = [("weight", nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16)))]
    text = message(lambda: Muon(narrow, algorithm="muonh", weight_decay=0.0).build())
    assert "keep the weights in float32" in text
