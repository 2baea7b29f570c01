"""The element-wise parts of a step: learning rates, and momentum of other dtypes. Bits: tests/parity."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.reference_muon import ReferenceMuon
from tests.shared import drawn
from titan_muon.engine.step import muon as update

SHAPES = {"tall": (48, 20), "wide": (20, 48), "square": (32, 32), "row": (1, 40), "column": (40, 1), "tiny": (1, 1)}


full = partial(drawn, SHAPES)


def test_the_host_does_not_read_a_rate_on_the_device() -> None:
    """A meta tensor has no value, as the host has none of a GPU's before the queue is done."""
    assert update.rate(torch.tensor([0.5], device="meta")).shape == ()
    assert update.rate(torch.tensor([0.5])) == 0.5


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"adjust_lr_fn": "original", "nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}],
)
def test_the_reference_of_the_tests_equals_torch_optim_muon(options: dict[str, Any]) -> None:
    """Parameters and momentum after four steps, bit for bit. tests/conformance compares Muon."""
    options = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": None, "nesterov": True, **options}
    params = {name: torch.nn.Parameter(value) for name, value in full(0).items()}
    optimizer, reference = torch.optim.Muon(params.values(), **options), ReferenceMuon(full(0), **options)
    for step in range(4):
        for name, grad in full(step + 1).items():
            params[name].grad = grad
        optimizer.step()
        reference.step(full(step + 1))
    for name, param in params.items():
        assert torch.equal(reference.params[name], param), name
        assert torch.equal(reference.average[name], optimizer.state[param]["momentum_buffer"]), name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("state", "wire"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_bf16_average_or_gradient_advances_in_float32(state: torch.dtype, wire: torch.dtype, nesterov: bool) -> None:
    """The result does not carry the rounding of a bf16 state; the state is the rounded average."""
    start, grad = torch.randn(64, 2).unbind(1)
    average, grad = start.to(state), grad.to(wire)
    exact = average.float().clone()
    expected, blended = torch.empty(64), torch.empty(64)
    update.update_momentum([exact], [grad.float()], [expected], 0.9, nesterov)
    update.update_momentum([average], [grad], [blended], 0.9, nesterov)
    assert torch.equal(blended, expected)
    assert torch.equal(average, exact.to(state))
