"""Checkpoints of other Muon optimizers go on here, and ours go on in torch.optim.Muon."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_muon import Muon, as_torch, converted

SHAPES = {"layers.0.w": (8, 12), "layers.1.w": (12, 8)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator)


def train(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def equal(first: dict[str, nn.Parameter], second: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in SHAPES)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_a_user_of_torchs_muon_changes_one_line_and_loads_the_old_checkpoint(adjust: str | None) -> None:
    params = parameters()
    theirs = torch.optim.Muon(params.values(), lr=0.02, momentum=0.9, adjust_lr_fn=adjust)
    train(theirs, params, range(3))
    others = copy.deepcopy(params)
    ours = Muon(others.values(), lr=0.02, momentum=0.9, adjust_lr_fn=adjust, orthogonalize="reference")
    ours.load_state_dict(theirs.state_dict())
    train(theirs, params, range(3, 6))
    train(ours, others, range(3, 6))
    assert equal(params, others)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_torchs_spellings_mean_the_same(adjust: str) -> None:
    params, others = parameters(), parameters()
    keywords: dict[str, Any] = {"lr": 0.02, "ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": adjust, "ns_steps": 4}
    train(torch.optim.Muon(params.values(), **keywords), params, range(3))
    train(Muon(others.values(), orthogonalize="reference", **keywords), others, range(3))
    assert equal(params, others)


def test_a_checkpoint_goes_on_in_torchs_muon() -> None:
    params = parameters()
    ours = Muon(list(params.items()), lr=0.02, orthogonalize="reference")
    train(ours, params, range(3))
    others = copy.deepcopy(params)
    theirs = torch.optim.Muon(others.values())
    theirs.load_state_dict(copy.deepcopy(as_torch(ours.state_dict())))
    train(ours, params, range(3, 6))
    train(theirs, others, range(3, 6))
    assert equal(params, others)


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"lr_scale": "spectral"}, "lr_scale = 'spectral'"), ({"ns_coefficients": "polar_express"}, "ns_coefficients")],
)
def test_what_torchs_muon_lacks_is_refused(options: dict[str, Any], fault: str) -> None:
    params = parameters()
    ours = Muon(list(params.items()), **options)
    train(ours, params, range(1))
    with pytest.raises(ValueError, match=fault):
        as_torch(ours.state_dict())


class SumOfGradients(torch.optim.Optimizer):
    """Muon as dion writes it: momentum is the sum m <- mu m + g, and Nesterov adds the gradient."""

    def __init__(self, params: Any, lr: float, mu: float) -> None:
        super().__init__(params, {"lr": lr, "mu": mu, "weight_decay": 0.1, "nesterov": True, "adjust_lr": "rms_norm"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum: Tensor = state.setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(group["mu"]).add_(param.grad)


def test_a_sum_of_gradients_becomes_their_average() -> None:
    params = parameters()
    theirs = SumOfGradients(params.values(), lr=0.02, mu=0.9)
    train(theirs, params, range(3))
    ours = Muon(list(params.items()))
    state = converted(theirs.state_dict(), "dion", ns_coefficients="polar_express_cushion")
    ours.load_state_dict(state)
    averages = {name: torch.zeros_like(param) for name, param in params.items()}
    for step in range(3):
        set_gradients(params, step)
        for name, param in params.items():
            assert param.grad is not None
            averages[name].lerp_(param.grad, 0.1)
    for name, param in params.items():
        torch.testing.assert_close(ours.state[param]["momentum_buffer"], averages[name])
    group = ours.param_groups[0]
    assert (group["lr"], group["momentum"], group["lr_scale"]) == (0.02, 0.9, "match_rms_adamw")
    assert group["ns_coefficients"] == "polar_express_cushion"


def test_what_cannot_be_converted_is_refused() -> None:
    params = parameters()
    theirs = torch.optim.Muon(params.values())
    with pytest.raises(ValueError, match="source = 'adam' is not one of torch, torchtitan"):
        converted(theirs.state_dict(), "adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameter 0: the state dict has no momentum_buffer"):
        converted(theirs.state_dict(), "torch")


def test_names_do_not_depend_on_wrappers() -> None:
    """As of a model under DDP, activation checkpointing, or torch.compile."""
    params = parameters()
    saving = Muon([(f"module._orig_mod.{name}", param) for name, param in params.items()])
    train(saving, params, range(1))
    loading = Muon(list(parameters().items()))
    assert loading.param_groups[0]["param_names"] == list(SHAPES)
    loading.load_state_dict(saving.state_dict())


def test_parameters_of_one_process_need_no_names() -> None:
    params, others = parameters(), parameters()
    unnamed = Muon(params.values(), orthogonalize="reference")
    train(unnamed, params, range(2))
    train(Muon(list(others.items()), orthogonalize="reference"), others, range(2))
    assert equal(params, others)
    assert unnamed.param_groups[0]["param_names"] == ["0.0", "0.1"]
