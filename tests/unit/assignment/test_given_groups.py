"""Hybrid.from_groups takes the parameter groups of Keller Jordan's and dion's Muon as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_muon import Expert, Hybrid

REFERENCE = Expert(orthogonalize="reference")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])
        self.head = nn.Linear(16, 24, bias=False)

    @property
    def matrices(self) -> list[Tensor]:
        return [block.weight for block in self.blocks]

    @property
    def rest(self) -> list[Tensor]:
        return [p for p in self.parameters() if not any(p is matrix for matrix in self.matrices)]

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def keller_jordan(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": model.rest, "lr": 0.02, "betas": (0.8, 0.95), "use_muon": False},
        {"params": model.matrices, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "use_muon": True},
    ]


def dion(model: Model) -> list[dict[str, Any]]:
    return [{"params": model.matrices}, {"params": model.rest, "algorithm": "adamw", "lr": 3e-4, "weight_decay": 0.0}]


def trained(model: Model, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    for step in range(3):
        model.set_gradients(step)
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


def test_groups_of_keller_jordan_train_as_muon_and_adamw_of_torch() -> None:
    model, other = Model(), Model()
    ours = trained(model, Hybrid.from_groups(model, keller_jordan(model), expert=REFERENCE))
    # His decay of AdamW is 0, and his eps 1e-10.
    adamw = torch.optim.AdamW(other.rest, lr=0.02, betas=(0.8, 0.95), eps=1e-10, weight_decay=0)
    muon = torch.optim.Muon(other.matrices, lr=0.05, momentum=0.9, weight_decay=0.01, adjust_lr_fn="original")
    for mine, expected in zip(ours, trained(other, adamw, muon), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_groups_of_dion_have_its_defaults_and_its_constructors_keywords() -> None:
    model = Model()
    hybrid = Hybrid.from_groups(model, dion(model), lr=0.02, mu=0.9, betas=(0.8, 0.9), weight_decay=0.1)
    muon, adamw = hybrid.param_groups
    given = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    defaults = {"nesterov": False, "adjust_lr_fn": "spectral_unclamped", "eps": 1e-8, "ns_coefficients": "you_jiacheng"}
    assert muon.items() >= (given | defaults).items()
    assert adamw.items() >= {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}.items()
    assert "groups[1]" in hybrid.table()


def test_a_hybrid_of_groups_continues_from_its_state_dict() -> None:
    model, other = Model(), Model()
    first = Hybrid.from_groups(model, keller_jordan(model), expert=REFERENCE)
    trained(model, first)
    other.load_state_dict(model.state_dict())
    second = Hybrid.from_groups(other, keller_jordan(other), expert=REFERENCE)
    second.load_state_dict(first.state_dict())
    for mine, expected in zip(trained(other, second), trained(model, first), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_parameters_in_no_group_are_named() -> None:
    model = Model()
    with pytest.warns(UserWarning, match=r"head\.weight: in no group, so that no optimizer trains them"):
        Hybrid.from_groups(
            model, [{**dion(model)[0], "algorithm": "muon"}, {**dion(model)[1], "params": model.rest[:3]}]
        )
