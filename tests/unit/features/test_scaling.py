"""A step under a GradScaler leaves nothing behind for the next step."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from titan_muon import Muon


def test_a_plain_step_after_a_failed_scaled_step_has_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], weight_decay=0.0)
    plain = muon.engine.step.algorithm

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    param.grad = torch.randn(6, 8)
    muon.found_inf, muon.grad_scale = torch.zeros(()), torch.tensor(2.0)
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
