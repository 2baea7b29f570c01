"""Rules are separate files, chosen by name, with separate scales and schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.dist.harness import run_program
from titan_muon import Muon, registry
from titan_muon.options import OptionError
from titan_muon.rules import RULES
from titan_muon.rules.muon import MuonRule

STEPS = """
import sys
sys.modules["titan_muon.rules.{removed}"] = None
import torch
from titan_muon import Muon
from torch import nn

for rule in {kept!r}:
    param = nn.Parameter(torch.eye(16))
    muon = Muon([("w", param)], rule=rule, weight_decay=0.0)
    param.grad = torch.randn(16, 16)
    muon.step()
    assert not param.equal(torch.eye(16))
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("removed", sorted(set(RULES) - {"muon"}))
def test_the_file_of_a_rule_can_be_deleted(removed: str) -> None:
    """All but muon.py, the base class."""
    code = STEPS.format(removed=removed, kept=[name for name in RULES if name != removed])
    status, shown = run_program("-c", code)
    assert (status, shown.strip()) == (0, "trained")


def trained(steps: int, rates: list[float] | None = None, **options: Any) -> tuple[Muon, Tensor]:
    """A Muon after some steps, and the weights."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(16, 24, generator=generator))
    muon = Muon([("w", param)], lr=0.02, orthogonalize="reference", **options)
    scheduler = None if rates is None else torch.optim.lr_scheduler.LambdaLR(muon, lambda step: rates[step])
    for _ in range(steps):
        param.grad = torch.randn(16, 24, generator=generator)
        muon.step()
        if scheduler is not None:
            scheduler.step()
    return muon, param.detach()


def test_decay_follows_lr_multiplies_decay_by_the_rate_over_the_maximum_rate() -> None:
    rates = [1.0, 0.5, 0.25, 0.0]
    _, follows = trained(3, rates, weight_decay=0.5, decay_follows_lr=True)
    param = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    # Without decay, updates add up; a decay multiplies the weights before an update.
    _, first = trained(1, rates, weight_decay=0.0)
    updates = [first - param]
    for steps in (2, 3):
        updates.append(trained(steps, rates, weight_decay=0.0)[1] - trained(steps - 1, rates, weight_decay=0.0)[1])
    for factor, update in zip(rates, updates, strict=False):
        param = param * (1 - 0.02 * factor * 0.5 * factor) + update
    torch.testing.assert_close(follows, param, rtol=1e-5, atol=1e-6)


def test_decay_follows_lr_is_zero_at_a_zero_rate() -> None:
    _, after = trained(2, [0.0, 0.0, 0.0], weight_decay=0.5, decay_follows_lr=True)
    assert after.equal(torch.randn(16, 24, generator=torch.Generator().manual_seed(0)))


SCHEDULES: dict[str, tuple[Callable[[Muon], Any], float]] = {
    "LambdaLR": (lambda muon: lr_scheduler.LambdaLR(muon, lambda step: (0.5, 1.0, 0.25, 0.0)[step]), 0.02),
    "OneCycleLR": (lambda muon: lr_scheduler.OneCycleLR(muon, 0.5, total_steps=5, cycle_momentum=False), 0.5),
    "by hand": (lambda muon: muon.param_groups[0].update(max_lr=0.1), 0.1),
}


@pytest.mark.parametrize(("schedule", "highest"), SCHEDULES.values(), ids=SCHEDULES.keys())
def test_decay_follows_lr_takes_the_highest_rate_of_the_schedule(
    schedule: Callable[[Muon], Any], highest: float
) -> None:
    param = nn.Parameter(torch.ones(16, 24))
    muon = Muon([("w", param)], lr=0.02, weight_decay=0.5, decay_follows_lr=True)
    scheduler = schedule(muon)
    for _ in range(3):
        lr = muon.param_groups[0]["lr"]
        assert muon._rule.rates(muon.param_groups[0]) == pytest.approx((lr, 0.5 * lr / highest))
        param.grad = torch.ones(16, 24)
        muon.step()
        if scheduler is not None:
            scheduler.step()


UNKNOWN: dict[str, Callable[[Muon], Any]] = {
    "no scheduler": lambda muon: None,
    "CyclicLR": lambda muon: lr_scheduler.CyclicLR(muon, 0.02, 2.0, step_size_up=4, cycle_momentum=False),
    "a factor above 1": lambda muon: lr_scheduler.LambdaLR(muon, lambda step: 1.0 + step),
    "layer decay": lambda muon: muon.param_groups[0].update(initial_lr=0.02, lr_scale=0.5),
    "above max_lr": lambda muon: muon.param_groups[0].update(max_lr=0.01),
}


@pytest.mark.parametrize("schedule", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_decay_follows_lr_without_the_highest_rate_is_refused(schedule: Callable[[Muon], Any]) -> None:
    param = nn.Parameter(torch.ones(16, 24))
    muon = Muon([("w", param)], lr=0.02, weight_decay=0.5, decay_follows_lr=True)
    scheduler = schedule(muon)
    param.grad = torch.ones(16, 24)
    if scheduler is not None:
        muon.step()
        scheduler.step()
    with pytest.raises(ValueError, match=r"w: decay_follows_lr = True needs the highest .* group\['max_lr'\]"):
        muon.step()
    muon.param_groups[0]["max_lr"] = 2.0
    muon.step()


def test_a_tensor_rate_decays_as_a_number() -> None:
    weights = []
    for lr in (0.02, torch.tensor(0.02)):
        param = nn.Parameter(torch.ones(16, 24))
        muon = Muon([("w", param)], lr=lr, weight_decay=0.5, decay_follows_lr=True)  # type: ignore[arg-type]
        torch.optim.lr_scheduler.ConstantLR(muon, factor=0.5)
        param.grad = torch.ones(16, 24)
        muon.step()
        weights.append(param.detach())
    torch.testing.assert_close(*weights)


def test_the_momentum_warms_up_and_continues_from_a_state_dict() -> None:
    options: dict[str, Any] = {"momentum_warmup_steps": 4, "momentum_start": 0.5, "momentum": 0.9}
    rule = MuonRule(Muon([("w", nn.Parameter(torch.eye(16)))], **options)._options)
    assert [rule.momentum({"momentum": 0.9, "step": step}) for step in (0, 1, 2, 4, 9)] == [0.5, 0.6, 0.7, 0.9, 0.9]
    muon, whole = trained(4, **options)
    assert muon.param_groups[0]["step"] == 4
    half, weights = trained(2, **options)
    again = nn.Parameter(weights.clone())
    resumed = Muon([("w", again)], lr=0.02, orthogonalize="reference", **options)
    resumed.load_state_dict(half.state_dict())
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(16, 24, generator=generator) for _ in range(5)][3:]
    for grad in grads:
        again.grad = grad
        resumed.step()
    assert again.equal(whole)


@pytest.mark.parametrize(("options", "factor"), [({"adjust_lr_fn": 0.18}, 0.9), ({"update_factor": 0.5}, 0.5)])
def test_factors_scale_only_the_update(options: dict[str, Any], factor: float) -> None:
    start = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    decayed = start * (1 - 0.02 * 0.5)
    plain, scaled = (trained(1, weight_decay=0.5, **keywords)[1] - decayed for keywords in ({}, options))
    torch.testing.assert_close(scaled, factor * plain, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "normoun"}, "rule = 'normoun' is unknown; did you mean 'normuon'"),
        ({"rule": "muonh"}, "weight_decay = 0.1: rule = 'muonh' keeps the norm"),
        ({"rule": "muonh", "cautious": True}, "cautious = True changes weight decay"),
        ({"rule": "muonh", "decay_follows_lr": True}, "decay_follows_lr = True changes weight decay"),
        ({"rule": "muonh", "overlap": "forward"}, "overlap = 'forward' applies updates in forward"),
        ({"rule": "muonh", "offload": "parameters"}, "offload = 'parameters'"),
        ({"adjust_lr_fn": True}, "adjust_lr_fn = True is not accepted"),
        ({"adjust_lr_fn": 0.0}, "adjust_lr_fn = 0.0 is not accepted"),
        ({"update_factor": 0.0}, "update_factor = 0.0 is not accepted"),
        ({"momentum_warmup_steps": -1}, "momentum_warmup_steps = -1 is not accepted"),
        ({"beta2": 0.9}, "beta2 = 0.9 has no effect without rule = 'normuon' or 'adamuon'; set both, or neither"),
        ({"momentum_start": 0.5}, "momentum_start = 0.5 has no effect without momentum_warmup_steps"),
    ],
)
def test_options_without_a_use_in_the_rule_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Muon([("w", nn.Parameter(torch.eye(16)))], **options)
    assert message in str(refused.value)


def test_scaled_coefficients_are_refused_only_for_the_reference() -> None:
    param = nn.Parameter(torch.randn(16, 24))
    options: dict[str, Any] = {"ns_coefficients": "aol", "ns_steps": 4}
    with pytest.raises(ValueError, match="ns_coefficients = 'aol' begins with a scaling"):
        Muon([("w", param)], orthogonalize="reference", **options).build()
    muon = Muon([("w", param)], lr=1.0, adjust_lr_fn="spectral_unclamped", weight_decay=0.0, **options)
    before, param.grad = param.detach().clone(), torch.randn(16, 24)
    muon.step()
    values = torch.linalg.svdvals((before - param.detach()) * (24 / 16) ** 0.5)
    assert values.min() > 0.9
    assert values.max() < 1.2


def test_muonh_refuses_bfloat16_weights_by_name() -> None:
    muon = Muon([("w", nn.Parameter(torch.eye(16).bfloat16()))], rule="muonh", weight_decay=0.0)
    with pytest.raises(ValueError, match=r"rule = 'muonh' needs float32 weights.*: w"):
        muon.build()


def test_a_third_party_rule_checks_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(MuonRule):
        def check(self, group: Any) -> None:
            raise OptionError("nesterov", "is not for this rule")

    monkeypatch.setitem(registry.rules._values, "refusing", Refusing)
    with pytest.raises(OptionError, match="nesterov is not for this rule"):
        Muon([("w", nn.Parameter(torch.eye(16)))], rule="refusing")
