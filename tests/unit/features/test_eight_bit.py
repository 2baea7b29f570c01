"""Momentum in 8 bits: the error of a block, unbiased rounding, and refusals."""

import math

import pytest
import torch
from torch import Tensor, nn

from titan_muon import Muon
from titan_muon.features.eight_bit import SCALE_BLOCK, decoded, encode


def encoded(momentum: Tensor, step: int = 0, key: int = 7) -> tuple[Tensor, Tensor]:
    rows, cols = momentum.shape
    wide = torch.zeros(rows, -(-cols // SCALE_BLOCK) * SCALE_BLOCK)
    wide[:, :cols] = momentum
    numbers, scales = torch.zeros(rows, cols, dtype=torch.int8), torch.zeros(rows, -(-cols // SCALE_BLOCK))
    encode(wide[:, :cols], numbers, scales, key, step)
    return numbers, scales


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cols", [1, 63, 64, 65, 200])
def test_the_error_of_an_element_is_below_the_scale_of_the_block(cols: int) -> None:
    momentum = drawn(5, cols) * torch.logspace(-8, 3, 5)[:, None]
    numbers, scales = encoded(momentum)
    error = (decoded(numbers, scales) - momentum).abs()
    assert (error <= scales.repeat_interleave(SCALE_BLOCK, 1)[:, :cols]).all()
    assert numbers.abs().amax() == 127


def test_rounding_keeps_the_mean() -> None:
    """Rounding to nearest would lose a change of a tenth of a unit for ever."""
    momentum = torch.full((1, 64), 0.1)
    momentum[0, 0] = 127.0
    draws = torch.stack([decoded(*encoded(momentum, step)) for step in range(2000)])[:, 0, 1:]
    assert abs(draws.mean().item() - 0.1) < 0.01
    assert set(draws.unique().tolist()) == {0.0, 1.0}


def test_a_decoded_momentum_encodes_to_the_same_numbers_for_every_draw() -> None:
    numbers, scales = encoded(drawn(8, 130))
    for step in range(20):
        again, new_scales = encoded(decoded(numbers, scales), step)
        assert torch.equal(again, numbers)
        torch.testing.assert_close(new_scales, scales, rtol=1e-6, atol=0)


def test_nonfinite_elements_become_zero_without_effect_on_the_block() -> None:
    momentum = drawn(2, 64)
    momentum[0, 3], momentum[1, 5] = math.nan, math.inf
    numbers, scales = encoded(momentum)
    assert numbers[0, 3] == numbers[1, 5] == 0
    assert scales.isfinite().all()
    assert (scales < 1).all()


def test_each_step_rounds_the_momentum_by_its_own_draws() -> None:
    param, numbers = nn.Parameter(drawn(16, 96)), []
    muon = Muon([("w", param)], momentum=0.0, state_dtype="int8")
    for _ in range(2):
        param.grad = drawn(16, 96, seed=1)
        muon.step()
        numbers.append(muon.state[param]["momentum_buffer"].clone())
    assert not torch.equal(*numbers)
