"""A step under a GradScaler leaves nothing behind for the next step."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from titan_muon import Muon
from titan_muon.adam import AdamW


def test_a_plain_step_after_a_failed_scaled_step_has_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], weight_decay=0.0)
    plain = muon.engine.step.algorithm

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    param.grad = torch.randn(6, 8)
    muon.found_inf, muon.grad_scale = torch.ones(()), torch.tensor(2.0)
    with monkeypatch.context() as patched:
        patched.setattr(muon.engine.step.mask, "zero_", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            muon.step()
    del muon.found_inf, muon.grad_scale
    muon.step()
    assert muon.engine.step.algorithm is plain
    assert not torch.equal(param, torch.ones(6, 8)), "the step is not skipped"


@pytest.mark.parametrize(
    "counted",
    [
        lambda muon: muon.state_dict()["param_groups"],
        lambda muon: deepcopy(muon).param_groups,
        lambda muon: muon.check_last_step() or muon.param_groups,
    ],
    ids=["saved", "copied", "checked"],
)
def test_a_skipped_step_is_not_counted(counted: Callable[[Muon], list[dict[str, int]]]) -> None:
    """The count moves the warm-up of the momentum and the draws of rounding."""
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], momentum_warmup_steps=4)
    for skips in (False, True, True, False, True):
        param.grad = torch.randn(6, 8)
        muon.found_inf = torch.tensor(float(skips))
        muon.step()
    assert [group["step"] for group in counted(muon)] == [2]
    param.grad = torch.randn(6, 8)
    muon.found_inf = torch.tensor(0.0)
    muon.step()
    assert [group["step"] for group in counted(muon)] == [3]


class Elsewhere(torch.Tensor):
    """A flag that is not on the CPU."""

    device = torch.device("meta")


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_adamw_does_not_count_a_step_that_the_device_skips(
    skipped: bool, foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_muon.adam.HostCopy", lambda flag: SimpleNamespace(value=flag))
    weights, expected = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer, reference = AdamW([weights], foreach=foreach), torch.optim.AdamW([expected], foreach=foreach)
    weights.grad, expected.grad = torch.full((4,), 0.5), torch.full((4,), 0.5)
    with monkeypatch.context() as patch:
        flag = torch.tensor(skipped).as_subclass(Elsewhere)
        patch.setattr(optimizer.gradient_faults, "check", lambda skip, scaled: flag)
        optimizer.step()
    for _ in range(2):
        reference.step()
    for _ in range(2 if skipped else 1):
        optimizer.step()
    assert torch.equal(weights, expected)
    assert optimizer.state_dict()["state"][0]["step"] == 2
