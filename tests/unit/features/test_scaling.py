"""A step under a GradScaler leaves nothing behind for the next step."""

import pytest
import torch
from torch import nn

from titan_muon import Muon


def test_a_plain_step_after_a_failed_scaled_step_has_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], weight_decay=0.0)
    plain = muon.engine.rank.rule

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    param.grad = torch.randn(6, 8)
    muon.found_inf, muon.grad_scale = torch.ones(()), torch.tensor(2.0)
    with monkeypatch.context() as patched:
        patched.setattr(muon.engine.rank, "_newton_schulz", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            muon.step()
    del muon.found_inf, muon.grad_scale
    muon.step()
    assert muon.engine.rank.rule is plain
    assert not torch.equal(param, torch.ones(6, 8)), "the step is not skipped"
