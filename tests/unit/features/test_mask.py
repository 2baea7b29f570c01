"""The mask of matrices without an update, in float64. Bits: tests/parity."""

from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Expert, Muon, clip_grad_norm_


@pytest.mark.parametrize("options", [{"idle": "hold"}], ids=str)
def test_float64_trains_with_a_mask_and_a_clip(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.randn(16, 24, dtype=torch.float64))
    muon, before = Muon([("w", param)], expert=Expert(**options)), param.detach().clone()
    param.grad = torch.full_like(param, 1e3)
    assert clip_grad_norm_([param], 1.0) == pytest.approx(1e3 * (16 * 24) ** 0.5)
    muon.step()
    muon.check_last_step()
    assert not torch.equal(param, before)
