"""`on_bad_gradient="skip_nonfinite"` skips what Newton-Schulz cannot normalize."""

import torch
from torch import nn

from titan_muon import Expert, Muon


def test_a_gradient_with_a_norm_that_overflows_is_skipped() -> None:
    """Finite elements of 1e20 have squares above float32."""
    weight = nn.Parameter(torch.ones(16, 16))
    muon = Muon([("w", weight)], expert=Expert(on_bad_gradient="skip_nonfinite"), weight_decay=0.1)
    weight.grad = torch.full_like(weight, 1e20)
    muon.step()
    assert torch.equal(weight, torch.ones(16, 16))
    assert not muon.state[weight]["momentum_buffer"].any()
