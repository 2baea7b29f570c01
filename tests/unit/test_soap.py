"""SOAP on one process: one-sided matrices, the ridge, and options that do not fit. Bits: tests/parity."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reference_soap import ReferenceSoap
from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.algorithms.soap import Soap
from titan_muon.options import OptionError

SHAPE = (24, 40)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(**options: Any) -> tuple[nn.Parameter, Muon]:
    param = nn.Parameter(drawn(0, *SHAPE))
    return param, Muon([("w", param)], **muon_keywords(lr=0.02, algorithm="soap", **options))


def step(param: nn.Parameter, muon: Muon, grad: Tensor) -> None:
    param.grad = grad.clone()
    muon.step()


def test_a_long_side_has_no_average_and_no_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Soap, "max_side", 30)
    param, muon = made(soap_freq=2)
    reference = ReferenceSoap({"w#0": param.detach().clone()}, soap_freq=2, max_side=30)
    for seed in range(1, 5):
        step(param, muon, drawn(seed, *SHAPE))
        reference.step({"w#0": drawn(seed, *SHAPE)})
    assert torch.equal(param, reference.params["w#0"])
    shapes = {name: tuple(state.shape) for name, state in muon.state[param].items()}
    assert shapes["soap_basis_rows.0"] == (24, 24)
    assert not any("cols" in name for name in shapes)


def test_the_first_bases_are_a_continuous_function_of_the_gradient() -> None:
    """The Gram matrix of columns is singular in the first step, and one rounding would turn eigenvectors at will."""
    weights = []
    for noise in (0.0, 6e-8):
        param, muon = made(soap_freq=2)
        for seed in range(1, 6):
            grad = drawn(seed, *SHAPE)
            step(param, muon, grad * (1 + noise * drawn(seed + 100, *SHAPE)))
        weights.append(param.detach())
    moved = (weights[0] - drawn(0, *SHAPE)).norm()
    assert 0 < (weights[0] - weights[1]).norm() / moved < 2e-3


def test_gradients_travel_in_float32_and_states_weigh_in_the_plan() -> None:
    _, muon = made()
    (work,) = muon.plan.works
    assert "float32" not in muon.plan.reason, "without other ranks nothing travels"
    assert work.wire_bytes == 4
    assert work.state_bytes == 4 * (2 * 24**2 + 2 * 40**2 + 2 * 24 * 40 + 1)


def test_a_move_to_the_host_is_refused_and_nothing_changes() -> None:
    param, muon = made()
    step(param, muon, drawn(1, *SHAPE))
    with pytest.raises(OptionError, match="offload = 'state' does not fit"):
        muon.offload()
    step(param, muon, drawn(2, *SHAPE))
